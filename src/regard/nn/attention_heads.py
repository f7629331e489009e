"""Helpers for multi-head attention: head sizes, scale, output projection, traced weights, and beams."""

import math
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.attention import scores, softmax
from regard.nn.checks import MOST_CHANNELS, MOST_HEADS, check_count
from regard.nn.core import Site
from regard.nn.mask import View

Scale = float | Literal["sqrt", "none"]


@runtime_checkable
class Heads(Protocol):
    """Interface: the head sizes in an attention spec. A size that is None is taken from the site."""

    @property
    def heads(self) -> int | None: ...
    @property
    def kv_heads(self) -> int | None: ...
    @property
    def d_head(self) -> int | None: ...
    @property
    def d_value(self) -> int | None: ...


def check_sizes(spec: Heads) -> None:
    """Refuse a number of heads or a head width that is below 1 or too large."""
    for name, most in (
        ("heads", MOST_HEADS),
        ("kv_heads", MOST_HEADS),
        ("d_head", MOST_CHANNELS),
        ("d_value", MOST_CHANNELS),
    ):
        check_count(name, getattr(spec, name), most)


def attention_site(spec: Heads, site: Site) -> tuple[Site, int]:
    """Return the site with the head sizes of `spec`, and the number of key-value heads."""
    heads = spec.heads or site.heads
    d_head = spec.d_head or (site.d_head if spec.heads is None else _divide(site, heads))
    d_value = spec.d_value or (site.d_value if spec.d_head is None and spec.heads is None else d_head)
    groups = spec.kv_heads or heads
    site.require(
        heads % groups == 0, "kv_heads", f"{groups} key-value heads do not divide {heads} heads; choose a divisor"
    )
    return site.inside("", heads=heads, d_head=d_head, d_value=d_value), groups


def _divide(site: Site, heads: int) -> int:
    site.require(
        site.d_model % heads == 0,
        "heads",
        f"{heads} heads do not divide d_model {site.d_model}; choose a divisor or set d_head",
    )
    return site.d_model // heads


def output_projection(site: Site, projected: bool, bias: bool | None) -> nn.Module:
    """Return the projection W_o, or the identity if the output is the concatenation of the heads."""
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
    """Return q with all beams of a source in one batch row, so that the keys of the source need not be copied."""
    return q if beams == 1 else q.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)


def beams_apart(y: Float[Tensor, "b H N W"], beams: int, T: int) -> Float[Tensor, "B H T W"]:
    """Return y with one batch row per beam; the inverse of `beams_together`."""
    return y if beams == 1 else y.unflatten(2, (beams, T)).transpose(1, 2).flatten(0, 1)


def factor(scale: Scale, d_head: int) -> float:
    """Return the factor that multiplies the scores: 1 / sqrt(d_head), 1, or `scale` if that is a number."""
    factors: dict[Scale, float] = {"sqrt": 1.0 / math.sqrt(d_head), "none": 1.0}
    return float(factors.get(scale, scale))


def attention_weights(q: Tensor, k: Tensor, view: View, scale: float) -> Float[Tensor, "B H T S"]:
    """Return the weights that `attend` applies; they are computed a second time, for a trace."""
    with torch.no_grad():
        return softmax(scores(q, k, view, scale), view)
