# pyright: reportMissingParameterType=false, reportIndexIssue=false, reportMissingImports=false
"""Fused linear layer and ReLU for training, relu(x W' + b).

ReLU is computed inside the matrix product, and the gradients of ReLU and of b are computed together. Separate
operations would read and write the wide hidden vectors of a feed-forward branch once more in the forward pass (for
ReLU), and read them once more in the backward pass (for b).

This module is imported only if there is a GPU, because Triton comes with the CUDA builds of torch.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.fast.operators import operator

TILE = {"ROWS": 16, "WIDE": 256, "num_warps": 4}
PROGRAMS = 128  # number of programs per tile of columns; each writes one row of partial sums


@triton.jit
def _backward(y_ptr, dy_ptr, g_ptr, sums_ptr, N, D, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Write g, which is dy where y > 0 and 0 elsewhere, and the sums of g over the tokens that this program reads."""
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    there = column < D
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < N)[:, None] & there[None, :]
        places = row.to(tl.int64)[:, None] * D + column[None, :]
        y = tl.load(y_ptr + places, mask=inside, other=0.0)
        dy = tl.load(dy_ptr + places, mask=inside, other=0.0)
        g = tl.where(y > 0.0, dy, 0.0)
        tl.store(g_ptr + places, g, mask=inside)
        total += g.to(tl.float32)
    tl.store(sums_ptr + tl.program_id(0) * D + column, tl.sum(total, 0), mask=there)


@operator("regard::linear_relu")
def rectified(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x W' + b), computed by one call of cuBLAS."""
    y = torch.ops.aten._addmm_activation(bias.to(x.dtype), x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=False)
    return y.view(*x.shape[:-1], -1)


@rectified.register_fake
def _(x, weight, bias):  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@operator("regard::relu_backward")
def rectified_backward(dy: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of ReLU's input, and the sum of this gradient over all tokens in float32."""
    y, dy = y.contiguous(), dy.contiguous()
    N, D = y.numel() // y.shape[-1], y.shape[-1]
    g, programs = torch.empty_like(y), min(PROGRAMS, triton.cdiv(N, TILE["ROWS"]))
    sums = y.new_empty(programs, D, dtype=torch.float32)
    with torch.cuda.device_of(y):
        _backward[(programs, triton.cdiv(D, TILE["WIDE"]))](y, dy, g, sums, N, D, **TILE)
    return g, sums.sum(0)


@rectified_backward.register_fake
def _(dy, y):  # noqa: ARG001
    return torch.empty_like(y, memory_format=torch.contiguous_format), y.new_empty(y.shape[-1], dtype=torch.float32)


def _remember(ctx, inputs, output) -> None:
    x, weight, bias = inputs
    ctx.dtype = bias.dtype
    ctx.save_for_backward(x, weight, output)


def _gradients(ctx, dy):
    x, weight, y = ctx.saved_tensors
    g, d_bias = rectified_backward(dy, y)
    return g @ weight, g.flatten(0, -2).t() @ x.flatten(0, -2), d_bias.to(ctx.dtype)


rectified.register_autograd(_gradients, setup_context=_remember)


def linear_relu(
    x: Float[Tensor, "*n i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"]
) -> Float[Tensor, "*n o"]:
    """Return relu(x W' + b) in the dtype of x."""
    return rectified(x, weight.to(x.dtype), bias)
