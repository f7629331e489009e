# pyright: reportMissingParameterType=false, reportIndexIssue=false, reportMissingImports=false
# ruff: noqa: PLR0913, PLR0917  # kernels take every pointer and size
"""Triton kernels for layer norm, also fused with a residual sum. Each pass, forward or backward, reads a vector once.

Under autocast, torch computes norms in float32, with a copy before and a copy after, and torch.compile reads a vector
three times for the gradients. Here each program (block of GPU threads) loads whole vectors in the dtype of the input,
recomputes mean and standard deviation in the backward pass, and sums the gradients of gain and bias over its vectors.
In the fused kernel, norm(x + dropout(added)), the sum is never stored.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.fast.dropout_rng import draw_seed, keep_mask
from regard.fast.operators import operator

TILE_SIZE = 2048  # elements of a tile: several short vectors or one long vector
PROGRAMS = 1024  # number of programs in a backward pass; each writes one row of partial sums


@triton.jit
def _centred(x, inside, D, eps):
    """Return the vectors of a tile minus their means, and the reciprocals of their standard deviations."""
    mean = tl.sum(x, 1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    return centred, 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + eps)


@triton.jit
def _summed(x_ptr, added_ptr, seed, places, inside, share, JOINS: tl.constexpr, DROPS: tl.constexpr):
    """Return s (x, or x + factor * added), rounded as if stored, and `factor`, which is 0 at dropped elements."""
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    factor = tl.full(x.shape, 1.0, tl.float32)
    if JOINS:
        added = tl.load(added_ptr + places, mask=inside, other=0.0).to(tl.float32)
        if DROPS:
            factor = tl.where(keep_mask(seed, places, share), 1.0 / (1.0 - share), 0.0)
        x = (x + added * factor).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x, factor


@triton.jit
def _forward(
    x_ptr, added_ptr, gain_ptr, bias_ptr, y_ptr, seed_ptr, N, D, eps, share,
    JOINS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)
    there = column < D
    inside = (row < N)[:, None] & there[None, :]
    places = row[:, None] * D + column[None, :]
    seed = tl.load(seed_ptr) if DROPS else 0
    x, _ = _summed(x_ptr, added_ptr, seed, places, inside, share, JOINS, DROPS)
    centred, scale = _centred(x, inside, D, eps)
    gain = tl.load(gain_ptr + column, mask=there, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
    y = centred * scale[:, None] * gain[None, :] + bias[None, :]
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x_ptr, added_ptr, gain_ptr, dy_ptr, dx_ptr, d_added_ptr, d_gain_ptr, d_bias_ptr, seed_ptr, N, D, eps, share,
    JOINS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDE)
    there = column < D
    gain = tl.load(gain_ptr + column, mask=there, other=0.0).to(tl.float32)
    seed = tl.load(seed_ptr) if DROPS else 0
    d_gain = tl.zeros((ROWS, WIDE), tl.float32)
    d_bias = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < N)[:, None] & there[None, :]
        places = row.to(tl.int64)[:, None] * D + column[None, :]
        x, factor = _summed(x_ptr, added_ptr, seed, places, inside, share, JOINS, DROPS)
        dy = tl.load(dy_ptr + places, mask=inside, other=0.0).to(tl.float32)
        centred, scale = _centred(x, inside, D, eps)
        normal = tl.where(inside, centred * scale[:, None], 0.0)  # beyond row N, scale is infinite if eps is 0
        d_gain += dy * normal
        d_bias += dy
        d_normal = dy * gain[None, :]
        along = tl.sum(d_normal * normal, 1) / D
        level = tl.sum(d_normal, 1) / D
        dx = (d_normal - level[:, None] - normal * along[:, None]) * scale[:, None]
        tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if DROPS:
            tl.store(d_added_ptr + places, (dx * factor).to(dx_ptr.dtype.element_ty), mask=inside)
    sums = tl.program_id(0) * D + column
    tl.store(d_gain_ptr + sums, tl.sum(d_gain, 0), mask=there)
    tl.store(d_bias_ptr + sums, tl.sum(d_bias, 0), mask=there)


def _tile(D: int) -> dict[str, int]:
    wide = triton.next_power_of_2(D)
    return {"ROWS": max(1, TILE_SIZE // wide), "WIDE": wide, "num_warps": 4 if wide <= TILE_SIZE else 8}


@operator("regard::layer_norm")
def normed(
    x: Tensor, added: Tensor | None, gain: Tensor, bias: Tensor, seed: Tensor | None, eps: float, dropout: float
) -> Tensor:
    """Return (s - mean) / sqrt(var + eps) * gain + bias, where s is x or x + dropout(added)."""
    x, other, seed_or_x = _arguments(x, added, seed)
    N, D = x.numel() // x.shape[-1], x.shape[-1]
    y, tile = torch.empty_like(x), _tile(D)
    flags = {"JOINS": added is not None, "DROPS": dropout > 0.0} | tile
    with torch.cuda.device_of(x):
        _forward[(triton.cdiv(N, tile["ROWS"]),)](x, other, gain, bias, y, seed_or_x, N, D, eps, dropout, **flags)
    return y


@normed.register_fake
def _(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("regard::layer_norm_backward")
def normed_backward(
    dy: Tensor, x: Tensor, added: Tensor | None, gain: Tensor, seed: Tensor | None, eps: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of s (the input of the norm), of `added`, and of gain and bias (2, D).

    Without dropout, an empty tensor is returned for `added`, because the gradient of `added` equals that of s.
    """
    x, other, seed_or_x = _arguments(x, added, seed)
    dy = dy.contiguous()
    N, D = x.numel() // x.shape[-1], x.shape[-1]
    dx, tile = torch.empty_like(x), _tile(D)
    d_added = torch.empty_like(x) if dropout > 0.0 else x.new_empty(0)
    programs = min(PROGRAMS, triton.cdiv(N, tile["ROWS"]))
    sums = x.new_empty(2, programs, D, dtype=torch.float32)
    flags = {"JOINS": added is not None, "DROPS": dropout > 0.0} | tile
    with torch.cuda.device_of(x):
        _backward[(programs,)](
            x, other, gain, dy, dx, d_added, sums[0], sums[1], seed_or_x, N, D, eps, dropout, **flags
        )  # fmt: skip
    return dx, d_added, sums.sum(1).to(gain.dtype)


@normed_backward.register_fake
def _(dy, x, added, gain, seed, eps, dropout):  # noqa: ARG001
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, torch.empty_like(dx) if dropout > 0.0 else x.new_empty(0), gain.new_empty(2, *gain.shape)


def _arguments(x: Tensor, added: Tensor | None, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x, added, seed) for a kernel. An argument that is None is replaced by x; the kernel does not read it."""
    x = x.contiguous()
    return x, x if added is None else added.contiguous(), x if seed is None else seed


def _remember(ctx, inputs, output) -> None:  # noqa: ARG001
    x, added, gain, _, seed, ctx.eps, ctx.dropout = inputs
    ctx.save_for_backward(x, added, gain, seed)


def _gradients(ctx, dy):
    saved = ctx.saved_tensors  # read once: with activation checkpointing, a second read is an error
    dx, dropped, (d_gain, d_bias) = normed_backward(dy, *saved, ctx.eps, ctx.dropout)
    d_added = None if saved[1] is None else dropped if ctx.dropout > 0.0 else dx
    return dx, d_added, d_gain, d_bias, None, None, None


normed.register_autograd(_gradients, setup_context=_remember)


def layer_norm(
    x: Float[Tensor, "*n D"],
    gain: Float[Tensor, " D"],
    bias: Float[Tensor, " D"],
    eps: float,
    added: Float[Tensor, "*n D"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "*n D"]:
    """Return the layer norm of x, or of x + dropout(added), in the dtype of x, even under autocast."""
    return normed(x, added, gain, bias, draw_seed(dropout, x.device), eps, dropout)
