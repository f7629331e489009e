# pyright: reportMissingParameterType=false, reportIndexIssue=false, reportMissingImports=false
# ruff: noqa: PLR0913, PLR0917  # a kernel is told all it needs
"""Layer norm as Triton kernels: vectors are read once forwards and once backwards, in the type they have.

torch makes norms in float32 under autocast, with a copy before and one after, and its compiler reads a vector three
times for the gradients. Here a program keeps whole vectors, finds their mean and deviation again on the way back, and
adds up the gradients of gain and bias over all that it meets.

Imported only where a GPU is: Triton comes with the CUDA builds of torch.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

WIDEST = 4096  # a program holds a whole vector
HELD = 2048  # numbers of a tile: several short vectors, or one long one
PROGRAMS = 1024  # of a backward pass: each leaves a row of gradients to be added up


@triton.jit
def _centred(x, inside, D, eps):
    """The vectors of a tile without their mean, and one over their deviation."""
    mean = tl.sum(x, 1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    return centred, 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + eps)


@triton.jit
def _forward(x_ptr, gain_ptr, bias_ptr, y_ptr, N, D, eps, ROWS: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)
    there = column < D
    inside = (row < N)[:, None] & there[None, :]
    places = row[:, None] * D + column[None, :]
    centred, scale = _centred(tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32), inside, D, eps)
    gain = tl.load(gain_ptr + column, mask=there, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
    y = centred * scale[:, None] * gain[None, :] + bias[None, :]
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x_ptr, gain_ptr, dy_ptr, dx_ptr, d_gain_ptr, d_bias_ptr, N, D, eps, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    column = tl.arange(0, WIDE)
    there = column < D
    gain = tl.load(gain_ptr + column, mask=there, other=0.0).to(tl.float32)
    d_gain = tl.zeros((ROWS, WIDE), tl.float32)
    d_bias = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < N)[:, None] & there[None, :]
        places = row.to(tl.int64)[:, None] * D + column[None, :]
        x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + places, mask=inside, other=0.0).to(tl.float32)
        centred, scale = _centred(x, inside, D, eps)
        normal = centred * scale[:, None]
        d_gain += dy * normal
        d_bias += dy
        d_normal = dy * gain[None, :]
        along = tl.sum(d_normal * normal, 1) / D
        level = tl.sum(d_normal, 1) / D
        dx = (d_normal - level[:, None] - normal * along[:, None]) * scale[:, None]
        tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    sums = tl.program_id(0) * D + column
    tl.store(d_gain_ptr + sums, tl.sum(d_gain, 0), mask=there)
    tl.store(d_bias_ptr + sums, tl.sum(d_bias, 0), mask=there)


def _tile(D: int) -> dict[str, int]:
    wide = triton.next_power_of_2(D)
    return {"ROWS": max(1, HELD // wide), "WIDE": wide, "num_warps": 4 if wide <= HELD else 8}


@torch.library.custom_op("regard::layer_norm", mutates_args=())
def normed(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * gain + bias."""
    x = x.contiguous()
    N, D = x.numel() // x.shape[-1], x.shape[-1]
    y, tile = torch.empty_like(x), _tile(D)
    _forward[(triton.cdiv(N, tile["ROWS"]),)](x, gain, bias, y, N, D, eps, **tile)
    return y


@normed.register_fake
def _(x, gain, bias, eps):  # noqa: ARG001
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("regard::layer_norm_backward", mutates_args=())
def normed_backward(dy: Tensor, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradient of x, and those of gain and bias (2, D)."""
    x, dy = x.contiguous(), dy.contiguous()
    N, D = x.numel() // x.shape[-1], x.shape[-1]
    dx, tile = torch.empty_like(x), _tile(D)
    programs = min(PROGRAMS, triton.cdiv(N, tile["ROWS"]))
    sums = x.new_empty(2, programs, D, dtype=torch.float32)
    _backward[(programs,)](x, gain, dy, dx, sums[0], sums[1], N, D, eps, **tile)
    return dx, sums.sum(1).to(gain.dtype)


@normed_backward.register_fake
def _(dy, x, gain, eps):  # noqa: ARG001
    return torch.empty_like(x, memory_format=torch.contiguous_format), gain.new_empty(2, *gain.shape)


def _remember(ctx, inputs, output) -> None:  # noqa: ARG001
    x, gain, _, ctx.eps = inputs
    ctx.save_for_backward(x, gain)


def _gradients(ctx, dy):
    x, gain = ctx.saved_tensors
    dx, (d_gain, d_bias) = normed_backward(dy, x, gain, ctx.eps)
    return dx, d_gain, d_bias, None


normed.register_autograd(_gradients, setup_context=_remember)


def layer_norm(
    x: Float[Tensor, "*n D"], gain: Float[Tensor, " D"], bias: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "*n D"]:
    """Layer norm in the type of x, whatever autocast says."""
    return normed(x, gain, bias, eps)
