"""Block-sparse attention with torch's FlexAttention. The block mask is built from the visible tiles."""

from collections.abc import Callable
from functools import cache
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._dynamo import config
from torch.nn.attention import flex_attention as flexible

from regard.fast.beam_cache import BeamMask
from regard.fast.tiles import tiles
from regard.nn.attention import cached
from regard.nn.mask import View
from regard.nn.pattern import text_lengths
from regard.nn.position.base import positions_of

SIZE = 128  # tokens in a tile: FlexAttention's default
FORMS = 2**16  # largest number of compiled forms: one for each shape, mask and bias


def flex_attention(
    q: Float[Tensor, "B H T K"], k: Float[Tensor, "B G S K"], v: Float[Tensor, "B G S V"], view: View, scale: float
) -> Float[Tensor, "B H T V"]:
    """Return the output of FlexAttention. The mask is passed as a block mask, and the position bias as `score_mod`."""
    block_mask = cached(view.shared, ("blocks", q.shape[0]), lambda: block_mask_of(view, q.shape[0]))
    kernel = fused if q.is_cuda and not torch.compiler.is_compiling() else flexible.flex_attention
    grouped = q.shape[1] != k.shape[1]
    return kernel(q, k, v, score_mod=score_mod(view, q.dtype), block_mask=block_mask, scale=scale, enable_gqa=grouped)


def fused(*args: Any, **options: Any) -> Tensor:
    """Run FlexAttention as a compiled kernel.

    By default, torch compiles a function for at most 8 shapes, and runs it as plain Python for further shapes.
    FlexAttention in plain Python computes all T x S scores. So the limit is raised here, and there is an error if the
    kernel cannot be compiled.
    """
    with config.patch(recompile_limit=FORMS, accumulated_recompile_limit=FORMS):
        return _compiled_flex()(*args, **options)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flexible.flex_attention, dynamic=False, fullgraph=True)


def block_mask_of(view: View, rows: int) -> flexible.BlockMask:
    """Return the mask of `view` as a block mask, built from visible tiles instead of all T x S pairs of tokens."""
    visible = tiles(view, SIZE)
    some, every = (x.expand(rows, -1, -1)[:, None] for x in (visible.some, visible.every))
    return flexible.BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(some & every),
        BLOCK_SIZE=SIZE,
        mask_mod=mask_mod(view),
        seq_lengths=(view.T, view.S),
    )


def _ordered(pairs: Tensor) -> tuple[Int[Tensor, "B 1 Q"], Int[Tensor, "B 1 Q K"]]:
    """Return the number of visible key tiles per query tile, and the key tile indices with visible tiles first."""
    index = pairs.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(-1, dtype=torch.int32), index.to(torch.int32).contiguous()


def score_mod(view: View, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Return the position bias of `view` as a function that adds it to a score, or None if there is no bias."""
    terms = view.terms
    if terms is None or (terms.bias is None and terms.by_distance is None):
        return None
    if terms.bias is not None:
        return _add_bias(terms.bias.to(dtype).contiguous())
    # One bias is stored for each distance, instead of T x S biases.
    q_pos, k_pos = view.mask.positions(view.T, view.S, view.device)
    assert terms.by_distance is not None
    far = max(positions_of(view).bound, view.mask.start + view.T)
    table = cached(
        view.lowered,
        ("bias of distances", dtype),
        lambda: terms.by_distance(torch.arange(-far, far + 1, device=view.device)).to(dtype).contiguous(),  # type: ignore[reportOptionalCall]
    )
    return _add_bias_of_distance(table, q_pos, k_pos, far)


def _add_bias(bias: Float[Tensor, "b H T S"]) -> Callable[..., Tensor]:
    per_row = bias.shape[0] > 1

    @no_type_check  # FlexAttention inspects the signature, which a type-checking wrapper would hide
    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b if per_row else 0, h, i, j]

    return add


def _add_bias_of_distance(
    table: Float[Tensor, "H D"], q_pos: Int[Tensor, "#b T"], k_pos: Int[Tensor, "#b S"], far: int
) -> Callable[..., Tensor]:
    q_row, k_row = q_pos.shape[0] > 1, k_pos.shape[0] > 1

    @no_type_check  # FlexAttention inspects the signature, which a type-checking wrapper would hide
    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = k_pos[b if k_row else 0, j] - q_pos[b if q_row else 0, i]
        return score + table[h, (distance + far).clamp(0, 2 * far)]

    return add


def mask_mod(view: View) -> Callable[[Any, Any, Any, Any], Tensor]:
    """Return the mask of a `View` as a function `mask_mod(b, h, i, j)` for FlexAttention."""
    mask = view.mask
    q_pos, k_pos = mask.positions(view.T, view.S, view.device)
    q_row, k_row = q_pos.shape[0] > 1, k_pos.shape[0] > 1
    padded = mask.k_seg is not None and not mask.order_hides_padding()
    pattern = mask.attention_pattern
    lengths = text_lengths(mask, view.S, view.device) if pattern is not None and pattern.reads_length else None
    length_row, length_query = (
        lengths is not None and n > 1 for n in (lengths.shape if lengths is not None else (1, 1))
    )
    on_path = mask.on_path() if isinstance(mask, BeamMask) and mask.on_path is not None else None

    @no_type_check  # FlexAttention inspects the signature, which a type-checking wrapper would hide
    def visible(b: Any, h: Any, i: Any, j: Any) -> Tensor:  # noqa: ARG001  # the signature is FlexAttention's
        q, k = q_pos[b if q_row else 0, i], k_pos[b if k_row else 0, j]
        shown = torch.ones_like(q == k)
        if mask.packed:
            shown = shown & (mask.q_seg[b, i] == mask.k_seg[b, j]) & (mask.k_seg[b, j] != 0)
        elif padded:
            shown = shown & (mask.k_seg[b, j] != 0)
        if mask.causal:
            past = k < q if mask.strict else k <= q
            shown = shown & (past if mask.prefix is None else past | mask.prefix[b, j])
        if pattern is not None:
            length = None if lengths is None else lengths[b if length_row else 0, i if length_query else 0]
            shown = shown & pattern.visible_in(q, k, length, None if mask.prefix is None else mask.prefix[b, j])
        if on_path is not None:
            shown = shown & on_path[b, i, j]
        return shown

    return visible
