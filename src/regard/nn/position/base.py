"""The two position slots: `Position` adds `Terms` to attention, `Additive` adds vectors to the input."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.checks import MOST_HEADS, check_count
from regard.nn.core import Site
from regard.nn.mask import View
from regard.nn.terms import Terms
from regard.tree import Spec


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of the queries and keys of a view."""

    q: Int[Tensor, "#b T"]
    k: Int[Tensor, "#b S"]
    bound: int  # host-side upper bound of all positions

    def distances(self) -> Int[Tensor, "#b T S"]:
        """Return j - i for query i and key j."""
        return self.k[:, None, :] - self.q[:, :, None]


class Position(Spec):
    """The position slot: the specs that add position terms to self-attention, in a whole stack or one layer."""

    __slots__ = ()
    shaped_by: ClassVar[tuple[str, ...]] = ("heads",)  # sizes that must be equal in a layer and in the stack

    @abstractmethod
    def build(self, site: Site) -> "PositionTerms":
        """Build a module that maps a `View` to `Terms`."""


class PositionTerms(nn.Module):
    """Abstract: a module that computes position terms, built by a `Position`."""

    @abstractmethod
    def forward(self, view: View) -> Terms:
        """Return the terms of the queries and keys of a view."""


@dataclass(frozen=True, slots=True)
class AtHeads(Spec):
    """A position scheme for attention layers with `heads` heads, if this is not the model's number of heads."""

    kind = "at_heads"
    heads: int
    position: Position

    def check(self) -> None:
        check_count("heads", self.heads, MOST_HEADS)


class Additive(Spec):
    """The additive position slot: the specs that compute a vector for each position."""

    __slots__ = ()

    @abstractmethod
    def build(self, site: Site, width: int) -> "AdditiveTable":
        """Build a module that maps positions to vectors of `width` channels."""


class AdditiveTable(nn.Module):
    """Abstract: a module that computes position vectors, built by an `Additive`."""

    @abstractmethod
    def forward(self, positions: Int[Tensor, "b T"], bound: int) -> Float[Tensor, "b T W"]:
        """Return the vectors of `positions`, which are all below `bound`."""


def positions_of(view: View) -> Positions:
    """Return the positions of the queries and keys of a view."""
    return Positions(*view.mask.positions(view.T, view.S, view.device), bound=view.mask.bound(view.S))


def check_shared_sizes(position: Position | None, site: Site, own: Site, kv_heads: int) -> None:
    """Refuse an attention whose sizes do not fit its position scheme.

    `position` is the scheme of the attention (None: that of the stack). `site` has the sizes of the stack, `own` those
    of the attention.
    """
    if position is not None:
        site.require(
            kv_heads == own.heads or "kv_heads" not in position.shaped_by,
            "kv_heads",
            f"{position.kind!r} needs as many key-value heads as query heads, {own.heads}, not {kv_heads}",
        )
        return
    shared = site.positions.get(own.heads, site.position)
    if shared is None:
        return
    sizes = {"heads": own.heads, "kv_heads": kv_heads, "d_head": own.d_head, "d_value": own.d_value}
    heads = own.heads if own.heads in site.positions else site.heads
    stack = {"heads": heads, "kv_heads": heads, "d_head": site.d_head, "d_value": site.d_value}
    for name in shared.shaped_by:
        site.require(
            sizes[name] == stack[name],
            name,
            f"is {sizes[name]}, but the stack's {shared.kind!r} position is for {stack[name]}; give this attention its "
            "own position, or remove that of the stack",
        )
