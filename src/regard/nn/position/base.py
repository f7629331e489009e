"""Position slots: Position adds Terms to attention, Additive adds vectors to the input."""

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
    """Slot: the position terms of self-attention, shared by the layers of a stack or of one layer."""

    __slots__ = ()
    shaped_by: ClassVar[tuple[str, ...]] = ("heads",)  # sizes that a layer must have in common with its stack

    @abstractmethod
    def build(self, site: Site) -> "PositionTerms":
        """Build a module from a View to Terms."""


class PositionTerms(nn.Module):
    """Abstract: the module a Position builds."""

    @abstractmethod
    def forward(self, view: View) -> Terms:
        """Return the terms of the queries and keys of a view."""


@dataclass(frozen=True, slots=True)
class AtHeads(Spec):
    """A stack's position for attentions with this number of heads, which differs from the model's."""

    kind = "at_heads"
    heads: int
    position: Position

    def check(self) -> None:
        check_count("heads", self.heads, MOST_HEADS)


class Additive(Spec):
    """Slot: a vector for each position."""

    __slots__ = ()

    @abstractmethod
    def build(self, site: Site, width: int) -> "AdditiveTable":
        """Build a module from positions to vectors of `width`."""


class AdditiveTable(nn.Module):
    """Abstract: the module an Additive builds."""

    @abstractmethod
    def forward(self, positions: Int[Tensor, "b T"], bound: int) -> Float[Tensor, "b T W"]:
        """Return the vectors of `positions`, all of them below `bound`."""


def positions_of(view: View) -> Positions:
    """Return the positions of the queries and keys of a view."""
    return Positions(*view.mask.positions(view.T, view.S, view.device), bound=view.mask.bound(view.S))


def check_shared_sizes(position: Position | None, site: Site, own: Site, kv_heads: int) -> None:
    """Refuse an attention whose sizes do not fit its own position, or that of its stack if it has none.

    `site` has the sizes of the stack, `own` those of the attention.
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
            f"{sizes[name]} differs from the stack's {stack[name]}, which its {shared.kind!r} position needs; "
            "give this attention a position of its own or none to the stack",
        )
