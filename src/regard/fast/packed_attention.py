# pyright: reportMissingParameterType=false, reportIndexIssue=false, reportMissingImports=false
# ruff: noqa: PLR0913, PLR0917, ARG001  # kernels take every stride; operators take what their gradients need
"""Triton kernels for packed (variable-length) attention, where a batch row holds several segments (texts).

A general kernel reads an additive mask in every layer and computes all pairs of tokens in a row, nine in ten of which
are hidden. A varlen kernel works in blocks, of which a sentence fills only a fifth. Here each block of queries reads
only the range of keys that contains its segments, and dropout is sampled inside the kernel. The kernels follow
FlashAttention (Dao et al. 2022).

This module is imported only if there is a GPU, because Triton comes with the CUDA builds of torch.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from regard.fast.dropout_rng import draw_seed, keep_mask
from regard.fast.operators import operator

BLOCK = 64  # number of queries and of keys in a block
LOG2_E = 1.0 / math.log(2.0)
LN_2: tl.constexpr = tl.constexpr(math.log(2.0))


@triton.jit
def _read(pointer, b, h, at, there, b_stride, h_stride, t_stride, K: tl.constexpr):
    """Load the vectors of the tokens `at` in one attention head, with zeros beyond the end of the batch row."""
    places = b * b_stride + h * h_stride + at[:, None] * t_stride + tl.arange(0, K)[None, :]
    return tl.load(pointer + places, mask=there[:, None], other=0.0)


@triton.jit
def _write(pointer, tile, b, h, at, there, b_stride, h_stride, t_stride, K: tl.constexpr):
    places = b * b_stride + h * h_stride + at[:, None] * t_stride + tl.arange(0, K)[None, :]
    tl.store(pointer + places, tile.to(pointer.dtype.element_ty), mask=there[:, None])


@triton.jit
def _reach(reach_ptr, b):
    """Return (start, end) of the range of tokens that this program reads for its block."""
    at = reach_ptr + (b * tl.num_programs(0) + tl.program_id(0)) * 2
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _visible(q_seg, k_seg, rows, columns, CAUSAL: tl.constexpr):
    """Return a mask of the keys that each query in a block may attend to."""
    visible = (q_seg[:, None] == k_seg[None, :]) & (k_seg[None, :] > 0)
    if CAUSAL:
        visible &= rows[:, None] >= columns[None, :]
    return visible


@triton.jit
def _weights(q, k, visible, top, scale):
    """Return the attention weights of queries q over keys k. `top` is log2 of each query's sum of exponentials."""
    return tl.where(visible, tl.exp2(tl.dot(q, tl.trans(k)) * scale - top[:, None]), 0.0)


@triton.jit
def _keep(seed, head, rows, columns, T, S, share):
    """Return a mask that is True at attention weights that dropout keeps. It does not depend on the block size."""
    return keep_mask(seed, (head.to(tl.int64) * T + rows)[:, None] * S + columns[None, :], share)


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, y_ptr, top_ptr, q_seg_ptr, k_seg_ptr, seed_ptr, reach_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t,
    H, T, S, scale, share,
    CAUSAL: tl.constexpr, DROPS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write y = softmax(scale * q k') v for a block of queries, and `top`.

    `top` is log2 of the sum of exponentials for each query.
    """
    head = tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = rows < T
    q_seg = tl.load(q_seg_ptr + b * T + rows, mask=real, other=0).to(tl.int32)
    begin, end = _reach(reach_ptr, b)
    q = _read(q_ptr, b, h, rows, real, q_b, q_h, q_t, K)
    seed = tl.load(seed_ptr) if DROPS else 0
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    y = tl.zeros((BLOCK, K), tl.float32)
    for start in range(begin, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        there = columns < S
        k_seg = tl.load(k_seg_ptr + b * S + columns, mask=there, other=0).to(tl.int32)
        k = _read(k_ptr, b, h, columns, there, k_b, k_h, k_t, K)
        v = _read(v_ptr, b, h, columns, there, v_b, v_h, v_t, K)
        visible = _visible(q_seg, k_seg, rows, columns, CAUSAL)
        s = tl.where(visible, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new = tl.maximum(highest, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # a row without a visible key so far
        p = tl.exp2(s - safe[:, None])
        fade = tl.exp2(highest - safe)
        total = total * fade + tl.sum(p, 1)
        if DROPS:
            p = tl.where(_keep(seed, head, rows, columns, T, S, share), p / (1.0 - share), 0.0)
        y = y * fade[:, None] + tl.dot(p.to(v.dtype), v)
        highest = new
    some = total > 0.0
    y = tl.where(some[:, None], y / tl.where(some, total, 1.0)[:, None], 0.0)
    _write(y_ptr, y, b, h, rows, real, y_b, y_h, y_t, K)
    tl.store(
        top_ptr + head.to(tl.int64) * T + rows,
        tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), 0.0),
        mask=real,
    )


@triton.jit
def _backward_q(
    q_ptr, k_ptr, v_ptr, y_ptr, dy_ptr, dq_ptr, top_ptr, fall_ptr, q_seg_ptr, k_seg_ptr, seed_ptr, reach_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t, dy_b, dy_h, dy_t, dq_b, dq_h, dq_t,
    H, T, S, scale, share,
    CAUSAL: tl.constexpr, DROPS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient dq for a block of queries, and `fall` = sum(y * dy) per query, which `_backward_kv` reads."""
    head = tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = rows < T
    q_seg = tl.load(q_seg_ptr + b * T + rows, mask=real, other=0).to(tl.int32)
    begin, end = _reach(reach_ptr, b)
    q = _read(q_ptr, b, h, rows, real, q_b, q_h, q_t, K)
    y = _read(y_ptr, b, h, rows, real, y_b, y_h, y_t, K)
    dy = _read(dy_ptr, b, h, rows, real, dy_b, dy_h, dy_t, K)
    top = tl.load(top_ptr + head.to(tl.int64) * T + rows, mask=real, other=0.0)
    fall = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    tl.store(fall_ptr + head.to(tl.int64) * T + rows, fall, mask=real)
    seed = tl.load(seed_ptr) if DROPS else 0
    dq = tl.zeros((BLOCK, K), tl.float32)
    for start in range(begin, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        there = columns < S
        k_seg = tl.load(k_seg_ptr + b * S + columns, mask=there, other=0).to(tl.int32)
        k = _read(k_ptr, b, h, columns, there, k_b, k_h, k_t, K)
        v = _read(v_ptr, b, h, columns, there, v_b, v_h, v_t, K)
        p = _weights(q, k, _visible(q_seg, k_seg, rows, columns, CAUSAL), top, scale)
        dp = tl.dot(dy, tl.trans(v))
        if DROPS:
            dp = tl.where(_keep(seed, head, rows, columns, T, S, share), dp / (1.0 - share), 0.0)
        ds = p * (dp - fall[:, None])
        dq += tl.dot(ds.to(k.dtype), k)
    dq *= scale * LN_2  # scale includes the factor log2(e)
    _write(dq_ptr, dq, b, h, rows, real, dq_b, dq_h, dq_t, K)


@triton.jit
def _backward_kv(
    q_ptr, k_ptr, v_ptr, dy_ptr, dk_ptr, dv_ptr, top_ptr, fall_ptr, q_seg_ptr, k_seg_ptr, seed_ptr, reach_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dy_b, dy_h, dy_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    H, T, S, scale, share,
    CAUSAL: tl.constexpr, DROPS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients dk and dv for a block of keys and values."""
    head = tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = columns < S
    k_seg = tl.load(k_seg_ptr + b * S + columns, mask=there, other=0).to(tl.int32)
    begin, end = _reach(reach_ptr, b)
    k = _read(k_ptr, b, h, columns, there, k_b, k_h, k_t, K)
    v = _read(v_ptr, b, h, columns, there, v_b, v_h, v_t, K)
    seed = tl.load(seed_ptr) if DROPS else 0
    dk = tl.zeros((BLOCK, K), tl.float32)
    dv = tl.zeros((BLOCK, K), tl.float32)
    for start in range(begin, end, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        real = rows < T
        q_seg = tl.load(q_seg_ptr + b * T + rows, mask=real, other=0).to(tl.int32)
        q = _read(q_ptr, b, h, rows, real, q_b, q_h, q_t, K)
        dy = _read(dy_ptr, b, h, rows, real, dy_b, dy_h, dy_t, K)
        top = tl.load(top_ptr + head.to(tl.int64) * T + rows, mask=real, other=0.0)
        fall = tl.load(fall_ptr + head.to(tl.int64) * T + rows, mask=real, other=0.0)
        p = _weights(q, k, _visible(q_seg, k_seg, rows, columns, CAUSAL), top, scale)
        dp = tl.dot(dy, tl.trans(v))
        dropped = p
        if DROPS:
            keep = _keep(seed, head, rows, columns, T, S, share)
            dropped = tl.where(keep, p / (1.0 - share), 0.0)
            dp = tl.where(keep, dp / (1.0 - share), 0.0)
        dv += tl.dot(tl.trans(dropped.to(dy.dtype)), dy)
        ds = p * (dp - fall[:, None])
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q)
    dk *= scale * LN_2
    _write(dk_ptr, dk, b, h, columns, there, dk_b, dk_h, dk_t, K)
    _write(dv_ptr, dv, b, h, columns, there, dv_b, dv_h, dv_t, K)


def _like(x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
    """Return an uninitialised tensor of the shape of x, with the heads of a token adjacent in memory."""
    B, H, T, K = x.shape
    return x.new_empty(B, T, H, K).transpose(1, 2)


def _readable(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with channels adjacent in memory, as the kernels require. Copy only if necessary."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _split(qkv: Float[Tensor, "B T 3 H K"]) -> tuple[Float[Tensor, "B H T K"], ...]:
    """Return (queries, keys, values) as views of the fused tensor `qkv`."""
    return qkv.transpose(1, 3).unbind(2)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _constants(q: Tensor, causal: bool, dropout: float) -> dict[str, object]:
    """Return the constants of a kernel. One pipeline stage is fastest on an H200, because most loops are short."""
    return {
        "CAUSAL": causal,
        "DROPS": dropout > 0.0,
        "K": q.shape[3],
        "BLOCK": BLOCK,
        "num_warps": 4,
        "num_stages": 1,
    }


def _run_forward(
    y: Tensor, parts: Sequence[Tensor], q_seg: Tensor, k_seg: Tensor, q_reach: Tensor, seed: Tensor | None,
    causal: bool, scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    """Write the attention output for q, k and v to `y`. Return log2 of each query's sum of exponentials (B, H, T)."""
    q, k, v = parts
    B, H, T, _ = q.shape
    top, seed_or_q = q.new_empty(B, H, T, dtype=torch.float32), q if seed is None else seed  # not read without dropout
    with torch.cuda.device_of(q):
        _forward[(triton.cdiv(T, BLOCK), B * H)](
            q, k, v, y, top, q_seg, k_seg, seed_or_q, q_reach, *_strides(q, k, v, y), H, T, k.shape[2],
            scale * LOG2_E, dropout, **_constants(q, causal, dropout),
        )  # fmt: skip
    return top


def _run_backward(
    gradients: Sequence[Tensor], parts: Sequence[Tensor], dy: Tensor, y: Tensor, top: Tensor,
    q_seg: Tensor, k_seg: Tensor, q_reach: Tensor, k_reach: Tensor, seed: Tensor | None,
    causal: bool, scale: float, dropout: float,
) -> None:  # fmt: skip
    """Write the gradients of q, k and v to `gradients`."""
    (dq, dk, dv), (q, k, v) = gradients, parts
    B, H, T, _ = q.shape
    S, fall, sizes = k.shape[2], torch.empty_like(top), _constants(q, causal, dropout)
    seed_or_q = q if seed is None else seed
    with torch.cuda.device_of(q):
        _backward_q[(triton.cdiv(T, BLOCK), B * H)](
            q, k, v, y, dy, dq, top, fall, q_seg, k_seg, seed_or_q, q_reach, *_strides(q, k, v, y, dy, dq),
            H, T, S, scale * LOG2_E, dropout, **sizes,
        )  # fmt: skip
        _backward_kv[(triton.cdiv(S, BLOCK), B * H)](
            q, k, v, dy, dk, dv, top, fall, q_seg, k_seg, seed_or_q, k_reach, *_strides(q, k, v, dy, dk, dv),
            H, T, S, scale * LOG2_E, dropout, **sizes,
        )  # fmt: skip


@operator("regard::attend_segments")
def attend_segments(
    q: Tensor, k: Tensor, v: Tensor, q_seg: Tensor, k_seg: Tensor, q_reach: Tensor, k_reach: Tensor,
    seed: Tensor | None, causal: bool, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention output (B, H, T, K), and log2 of each query's sum of exponentials (B, H, T)."""
    y = _like(q)
    return y, _run_forward(y, _readable(q, k, v), q_seg, k_seg, q_reach, seed, causal, scale, dropout)


@attend_segments.register_fake
def _(q, *_):
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator("regard::attend_segments_backward")
def attend_segments_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, top: Tensor, q_seg: Tensor, k_seg: Tensor,
    q_reach: Tensor, k_reach: Tensor, seed: Tensor | None, causal: bool, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    gradients = _like(q), _like(k), _like(v)
    dy, y = _readable(dy, y)
    settings = (causal, scale, dropout)
    _run_backward(gradients, _readable(q, k, v), dy, y, top, q_seg, k_seg, q_reach, k_reach, seed, *settings)
    return gradients


@attend_segments_backward.register_fake
def _(dy, q, k, v, *_):
    return _like(q), _like(k), _like(v)


def _remember(ctx, inputs, output) -> None:
    q, k, v, *rest, ctx.causal, ctx.scale, ctx.dropout = inputs
    ctx.save_for_backward(q, k, v, *output, *rest)


def _gradients(ctx, dy, _):
    gradients = attend_segments_backward(dy, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.dropout)
    return (*gradients, *[None] * 8)


attend_segments.register_autograd(_gradients, setup_context=_remember)


@operator("regard::attend_joint")
def attend_joint(
    qkv: Tensor, seg: Tensor, q_reach: Tensor, k_reach: Tensor, seed: Tensor | None,
    causal: bool, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `attend_segments` for fused queries, keys and values `qkv` (B, T, 3, H, K).

    The gradient is a fused tensor, too.
    """
    parts = _split(qkv)
    y = _like(parts[0])
    return y, _run_forward(y, parts, seg, seg, q_reach, seed, causal, scale, dropout)


@attend_joint.register_fake
def _(qkv, *_):
    q = _split(qkv)[0]
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator("regard::attend_joint_backward")
def attend_joint_backward(
    dy: Tensor, qkv: Tensor, y: Tensor, top: Tensor, seg: Tensor, q_reach: Tensor, k_reach: Tensor, seed: Tensor | None,
    causal: bool, scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of `qkv`."""
    gradients = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    dy, y = _readable(dy, y)
    settings = (causal, scale, dropout)
    _run_backward(_split(gradients), _split(qkv), dy, y, top, seg, seg, q_reach, k_reach, seed, *settings)
    return gradients


@attend_joint_backward.register_fake
def _(dy, qkv, *_):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _remember_joint(ctx, inputs, output) -> None:
    qkv, *rest, ctx.causal, ctx.scale, ctx.dropout = inputs
    ctx.save_for_backward(qkv, *output, *rest)


def _joint_gradient(ctx, dy, _):
    gradients = attend_joint_backward(dy, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.dropout)
    return (gradients, *[None] * 7)


attend_joint.register_autograd(_joint_gradient, setup_context=_remember_joint)


def reach(
    seg: Int[Tensor, "B T"], other: Int[Tensor, "B S"], causal: Literal["back", "on"] | None
) -> Int[Tensor, "B n 2"]:
    """For each block of tokens in `seg`, return the range (start, end) of the tokens in `other` in the same segments.

    A kernel reads only this range for the block. With `causal="back"` (blocks of queries), the range ends with the
    block itself. With `causal="on"` (blocks of keys), the range starts with the block itself.
    """
    blocks = F.pad(seg, (0, -seg.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    high = blocks.amax(-1, keepdim=True)
    low = blocks.where(blocks > 0, high).amin(-1, keepdim=True)
    others, S = other[:, None, :], other.shape[1]
    inside = (others >= low) & (others <= high) & (others > 0)
    index = torch.arange(S, device=seg.device)
    begin, end = index.where(inside, S).amin(-1), (index + 1).where(inside, 0).amax(-1)
    own = torch.arange(blocks.shape[1], device=seg.device) * BLOCK
    if causal == "back":
        end = torch.minimum(end, own + BLOCK)
    elif causal == "on":
        begin = torch.maximum(begin, own)
    return torch.stack((begin, end), -1).int()


class Layout(NamedTuple):
    """Segments of queries and keys, and the range of tokens that each block reads. All layers share one layout."""

    q_seg: Int[Tensor, "B T"]
    k_seg: Int[Tensor, "B S"]
    q_reach: Int[Tensor, "B n 2"]
    k_reach: Int[Tensor, "B m 2"]
    causal: bool


def lay_out(q_seg: Int[Tensor, "B T"], k_seg: Int[Tensor, "B S"], causal: bool) -> Layout:
    """Return the `Layout` (segments, and the range of tokens that each block reads) for packed batch rows."""
    q_reach = reach(q_seg, k_seg, "back" if causal else None)
    k_reach = reach(k_seg, q_seg, "on" if causal else None)
    return Layout(q_seg.contiguous(), k_seg.contiguous(), q_reach, k_reach, causal)


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    v: Float[Tensor, "B H S K"],
    layout: Layout,
    scale: float,
    dropout: float,
    qkv: Float[Tensor, "B T 3 H K"] | None = None,
) -> Float[Tensor, "B H T K"]:
    """Return softmax(scale * q k') v over the keys in the segment of each query.

    With a causal layout, a query attends only to keys up to its own position. The output for padding (segment 0) is
    zero. If q, k and v are views of a fused projection `qkv`, the gradient of `qkv` is computed as one tensor.
    """
    q_seg, k_seg, q_reach, k_reach, causal = layout
    seed = draw_seed(dropout, q.device)
    if qkv is not None:
        return attend_joint(qkv, q_seg, q_reach, k_reach, seed, causal, scale, dropout)[0]
    return attend_segments(q, k, v, q_seg, k_seg, q_reach, k_reach, seed, causal, scale, dropout)[0]
