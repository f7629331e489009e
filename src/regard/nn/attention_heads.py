"""Helpers for multi-head attention: head sizes, score scale, output projection, recorded weights, batches of beams."""

import math
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.attention import scores, softmax
from regard.nn.checks import MOST_CHANNELS, MOST_HEADS, check_count
from regard.nn.core import Role, Site
from regard.nn.mask import Mask, View
from regard.nn.pattern import AttentionPattern
from regard.nn.position.base import Position, check_shared_sizes, query_positions

Scale = float | Literal["sqrt", "none"]


@runtime_checkable
class Heads(Protocol):
    """Interface of attention specs: numbers and widths of heads. None means the default of the model."""

    @property
    def heads(self) -> int | None: ...
    @property
    def kv_heads(self) -> int | None: ...
    @property
    def d_head(self) -> int | None: ...
    @property
    def d_value(self) -> int | None: ...


def check_sizes(spec: Heads) -> None:
    """Raise a `SpecError` if a number of heads or a head width is below 1 or too large."""
    for name, most in (
        ("heads", MOST_HEADS),
        ("kv_heads", MOST_HEADS),
        ("d_head", MOST_CHANNELS),
        ("d_value", MOST_CHANNELS),
    ):
        check_count(name, getattr(spec, name), most)


def attention_site(spec: Heads, site: Site) -> tuple[Site, int]:
    """Return a copy of `site` with the head sizes of `spec`, and the number of key-value heads."""
    heads = spec.heads or site.heads
    d_head = spec.d_head or (site.d_head if spec.heads is None else _divide(site, heads))
    d_value = spec.d_value or (site.d_value if spec.d_head is None and spec.heads is None else d_head)
    groups = spec.kv_heads or heads
    site.require(
        heads % groups == 0, "kv_heads", f"{groups} key-value heads do not divide {heads} heads; choose a divisor"
    )
    return site.inside("", heads=heads, d_head=d_head, d_value=d_value), groups


class SelfAttentionSpec(Heads, Protocol):
    """Interface of specs for self-attention with its own attention pattern, position scheme and tied projections."""

    @property
    def attention_pattern(self) -> AttentionPattern | None: ...
    @property
    def position(self) -> Position | None: ...
    @property
    def tied(self) -> str: ...


def own_site(spec: SelfAttentionSpec, site: Site) -> tuple[Site, int]:
    """Return `attention_site`, after checks of attention pattern, position scheme and tied projections of `spec`."""
    check_pattern(spec.attention_pattern, site)
    own, kv_heads = attention_site(spec, site)
    check_shared_sizes(spec.position, site, own, kv_heads)
    check_tied(spec.tied, own, kv_heads)
    return own, kv_heads


def tying(tied: str, widths: dict[Role, int]) -> tuple[dict[Role, int], tuple[int, int, int]]:
    """Return the widths of the projections that are not left out, and the index of the one for q, for k and for v.

    `widths` are those of W_q, W_k and W_v. With `tied` "query_key", W_k is left out. With "key_value", W_v is left out.
    """
    left_out, index = {"none": (None, (0, 1, 2)), "query_key": ("key", (0, 0, 1)), "key_value": ("value", (0, 1, 1))}[
        tied
    ]
    return {role: width for role, width in widths.items() if role != left_out}, index


def check_pattern(pattern: AttentionPattern | None, site: Site) -> None:
    """Raise a `SpecError` if an attention pattern cannot be used in a stack like that of `site`."""
    reason = None if pattern is None else pattern.refusal(site.causal, site.sees_ahead)
    if reason is not None:
        raise site.error("attention_pattern", reason)


def check_tied(tied: str, site: Site, kv_heads: int) -> None:
    """Raise a `SpecError` if two projections that are `tied` to be equal have different sizes."""
    site.require(
        tied != "query_key" or kv_heads == site.heads,
        "tied",
        f"{kv_heads} key-value heads cannot have the projection of {site.heads} query heads; make the numbers equal",
    )
    site.require(
        tied != "key_value" or site.d_head == site.d_value,
        "tied",
        f"values of width {site.d_value} cannot have the projection of keys of width {site.d_head}; set equal widths",
    )


def _divide(site: Site, heads: int) -> int:
    site.require(
        site.d_model % heads == 0,
        "heads",
        f"{heads} heads do not divide d_model {site.d_model}; choose a divisor or set d_head",
    )
    return site.d_model // heads


def output_projection(site: Site, projected: bool, bias: bool | None) -> nn.Module:
    """Return the output projection W_o if `projected`, otherwise the identity (heads are only concatenated)."""
    H, V = site.heads, site.d_value
    if projected:
        return site.linear(H * V, {"attend_out": site.d_model}, bias=bias)
    site.require(
        site.d_model == H * V or site.nested,
        "output",
        f"without W_o the heads must add up to d_model {site.d_model}, not {H} x {V}",
    )
    return nn.Identity()


def beams_together(q: Float[Tensor, "B H T K"], beams: int) -> Float[Tensor, "b H N K"]:
    """Move the queries of all beams of a source into one batch row, so that the beams share the keys of the source."""
    return q if beams == 1 else q.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)


def beams_apart(y: Float[Tensor, "b H N W"], beams: int, T: int) -> Float[Tensor, "B H T W"]:
    """Move the outputs of each beam into a batch row of its own: the inverse of `beams_together`."""
    return y if beams == 1 else y.unflatten(2, (beams, T)).transpose(1, 2).flatten(0, 1)


def factor(scale: Scale, d_head: int) -> float:
    """Return the factor of the attention scores. It is 1 / sqrt(d_head) for "sqrt", 1 for "none", or a given number."""
    factors: dict[Scale, float] = {"sqrt": 1.0 / math.sqrt(d_head), "none": 1.0}
    return float(factors.get(scale, scale))


def attention_weights(
    q: Tensor, k: Tensor, view: View, scale: float, rows: slice | None = None
) -> Float[Tensor, "B H T S"]:
    """Compute the attention weights of `attend` again, without dropout and gradients, to record them in a trace.

    `rows` selects queries (default: all). The weights of other queries are not computed, except with a position scheme
    whose scores depend on the query.
    """
    with torch.no_grad():
        if rows is None:
            weights = softmax(scores(q, k, view, scale), view)
        elif view.terms is not None and view.terms.content is not None:
            weights = softmax(scores(q, k, view, scale), view)[:, :, rows].clone()
        else:
            part = rows_of(view, rows)
            weights = softmax(scores(q[:, :, rows], k, part, scale), part)
        return weights if view.mask.columns is None else _by_position(weights, view.mask, view.mask.columns)


def rows_of(view: View, rows: slice) -> View:
    """Return the view of some of the queries to all keys."""
    mask, terms = view.mask, view.terms
    seg = None if mask.q_seg is None else mask.q_seg[:, rows]
    positions = query_positions(mask, view.T, view.device)[:, rows]
    if terms is not None and terms.bias is not None:
        bias = terms.bias if terms.bias.shape[2] == 1 else terms.bias[:, :, rows]
        terms = replace(terms, bias=bias)
    part = replace(mask, q_pos=positions, q_seg=seg)
    return replace(view, mask=part, T=positions.shape[1], terms=terms, lowered={}, shared={}, by_heads={})


def _by_position(weights: Float[Tensor, "B H T R"], mask: Mask, S: int) -> Float[Tensor, "B H T S"]:
    """Move the weights of the keys in a ring cache to the columns of their positions. Empty slots have no weight."""
    assert mask.k_pos is not None
    column = mask.k_pos.clamp(max=S - 1)[:, None, None].expand_as(weights)
    return weights.new_zeros(*weights.shape[:3], S).scatter_add(-1, column, weights)
