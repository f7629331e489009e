"""Position slots: Position reaches attention as Terms, Additive reaches the input as vectors."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.core import MOST_HEADS, Site, Terms, View, check_count
from regard.tree import Spec


@dataclass(frozen=True, slots=True)
class Places:
    """Where the queries and keys of a view are."""

    q: Int[Tensor, "#b T"]
    k: Int[Tensor, "#b S"]
    bound: int  # every position is below this host-side number

    def distances(self) -> Int[Tensor, "#b T S"]:
        """j - i for query i and key j."""
        return self.k[:, None, :] - self.q[:, :, None]


class Position(Spec):
    """Slot: what positions contribute to self-attention. Stands in a stack (shared by its layers) or in one layer."""

    __slots__ = ()
    shaped_by: ClassVar[tuple[str, ...]] = ("heads",)  # sizes in which a layer must not differ from its stack

    @abstractmethod
    def build(self, site: Site) -> "PositionTerms":
        """A module from Places to Terms."""


class PositionTerms(nn.Module):
    """Abstract: the module a Position builds."""

    @abstractmethod
    def forward(self, places: Places) -> Terms:
        """The terms at these places."""


@dataclass(frozen=True, slots=True)
class AtHeads(Spec):
    """A position that a stack shares among the attentions with so many heads, where they differ from the model's."""

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
        """A module from positions to vectors of `width`."""


class AdditiveTable(nn.Module):
    """Abstract: the module an Additive builds."""

    @abstractmethod
    def forward(self, positions: Int[Tensor, "b T"], bound: int) -> Float[Tensor, "b T W"]:
        """The vectors of `positions`, all of which are below the host-side number `bound`."""


def places(view: View) -> Places:
    """Where the queries and keys of this view are."""
    return Places(*view.mask.positions(view.T, view.S, view.device), bound=view.mask.bound(view.S))
