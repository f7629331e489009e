"""Branch slot, and the sizes of self- and cross-attention."""

from abc import abstractmethod
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.core import MOST_CHANNELS, MOST_HEADS, Branch, Site, check_count
from regard.tree import Spec


class BranchSpec(Spec):
    """Slot: describes a branch."""

    __slots__ = ()
    attends: ClassVar[bool] = False  # by scores to other tokens of x: a stack's position and pattern apply to it
    packs: ClassVar[bool] = True  # works on packed rows without mixing their segments
    ordered: ClassVar[bool] = False  # depends on the order of tokens by itself: convolution, recurrence

    @abstractmethod
    def build(self, site: Site) -> Branch:
        """The branch at this site."""


@runtime_checkable
class Heads(Protocol):
    """The sizes an attention spec may set; None takes the site's."""

    @property
    def heads(self) -> int | None: ...
    @property
    def kv_heads(self) -> int | None: ...
    @property
    def d_head(self) -> int | None: ...
    @property
    def d_value(self) -> int | None: ...


def check_sizes(spec: Heads) -> None:
    """Refuse sizes that could not be built."""
    for name, most in (
        ("heads", MOST_HEADS),
        ("kv_heads", MOST_HEADS),
        ("d_head", MOST_CHANNELS),
        ("d_value", MOST_CHANNELS),
    ):
        size = getattr(spec, name)
        if size is not None:
            check_count(name, size, most)


def attention_site(spec: Heads, site: Site) -> tuple[Site, int]:
    """The site with the sizes of this attention, and its number of key-value heads."""
    heads = spec.heads or site.heads
    d_head = spec.d_head or (site.d_head if spec.heads is None else _divide(site, heads))
    d_value = spec.d_value or (site.d_value if spec.d_head is None and spec.heads is None else d_head)
    groups = spec.kv_heads or heads
    if heads % groups:
        raise site.error("kv_heads", f"{groups} key-value heads do not divide {heads} heads; choose a divisor")
    return site.inside("", heads=heads, d_head=d_head, d_value=d_value), groups


def _divide(site: Site, heads: int) -> int:
    if site.d_model % heads:
        raise site.error("heads", f"{heads} heads do not divide d_model {site.d_model}; choose a divisor or set d_head")
    return site.d_model // heads


def output_projection(site: Site, wanted: bool, bias: bool | None) -> nn.Module:
    """W_o, or nothing where the heads laid side by side are the stream themselves."""
    H, V = site.heads, site.d_value
    if wanted:
        return site.linear(H * V, {"attend_out": site.d_model}, bias=bias)
    if site.d_model != H * V and not site.held:
        raise site.error(
            "output", f"without it the heads must make up the stream: {H} x {V} is not d_model {site.d_model}"
        )
    return nn.Identity()


def beams_together(q: Float[Tensor, "B H T K"], beams: int) -> Float[Tensor, "b H N K"]:
    """Queries of all beams of a source as queries of one row, so that its keys need not be copied."""
    return q if beams == 1 else q.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)


def beams_apart(y: Float[Tensor, "b H N W"], beams: int, T: int) -> Float[Tensor, "B H T W"]:
    """Queries of a source row back to one row per beam."""
    return y if beams == 1 else y.unflatten(2, (beams, T)).transpose(1, 2).flatten(0, 1)
