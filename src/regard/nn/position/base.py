"""Base classes of position schemes: `Position` for attention, `Additive` for vectors added to the input."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.checks import MOST_HEADS, check_count
from regard.nn.core import Site
from regard.nn.mask import Mask, View
from regard.nn.terms import Terms
from regard.tree import Spec


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of T queries and S keys, and an upper bound of them."""

    q: Int[Tensor, "#b T"]
    k: Int[Tensor, "#b S"]
    bound: int  # host-side upper bound of all positions

    def distances(self) -> Int[Tensor, "#b T S"]:
        """Return j - i for every query position i and key position j."""
        return self.k[:, None, :] - self.q[:, :, None]


class Position(Spec):
    """Abstract base class of specs for position schemes of self-attention, such as rotary embeddings or ALiBi."""

    __slots__ = ()
    shaped_by: ClassVar[tuple[str, ...]] = ("heads",)  # sizes that a layer must share with its stack to use this scheme
    scores_pairs: ClassVar[bool] = True  # whether it adds scores or values for pairs of a query and a key

    @abstractmethod
    def build(self, site: Site) -> "PositionTerms":
        """Build the module that computes the position terms of attention."""


class PositionTerms(nn.Module):
    """Abstract base class of modules that compute position terms of attention. They are built by a `Position`."""

    @abstractmethod
    def forward(self, view: View) -> Terms:
        """Return the position terms (biases, rotations, ...) for the queries and keys of a `View`."""


@dataclass(frozen=True, slots=True)
class AtHeads(Spec):
    """A position scheme for attention layers whose number of heads, `heads`, differs from the model's default."""

    kind = "at_heads"
    heads: int
    position: Position

    def check(self) -> None:
        check_count("heads", self.heads, MOST_HEADS)


class Additive(Spec):
    """Abstract base class of specs for position vectors that are added to the input."""

    __slots__ = ()

    @abstractmethod
    def build(self, site: Site, width: int) -> "AdditiveTable":
        """Build the module that maps positions to vectors of `width` channels."""


class AdditiveTable(nn.Module):
    """Abstract base class of modules that compute position vectors. They are built by an `Additive`."""

    @abstractmethod
    def forward(self, positions: Int[Tensor, "b T"], bound: int) -> Float[Tensor, "b T W"]:
        """Return the vectors of `positions`, which are all below `bound`."""


def query_positions(mask: Mask, T: int, device: torch.device) -> Int[Tensor, "#b T"]:
    """Return the positions of the T queries of a mask, without a tensor as long as the keys."""
    return torch.arange(mask.start, mask.start + T, device=device)[None] if mask.q_pos is None else mask.q_pos


def positions_of(view: View) -> Positions:
    """Return the positions of the queries and keys of a `View`, and an upper bound of them."""
    return Positions(*view.mask.positions(view.T, view.S, view.device), bound=view.mask.bound(view.S))


def position_bias(view: View) -> Float[Tensor, "b H T S"] | None:
    """Return the bias that the position scheme adds to the scores, or None. It is cached for the layers of a stack."""
    terms = view.terms
    if terms is None or terms.by_distance is None:
        return None if terms is None else terms.bias
    if "bias" not in view.lowered:
        view.lowered["bias"] = terms.by_distance(positions_of(view).distances()).transpose(0, 1)
    return view.lowered["bias"]


def add_bias(scores: Float[Tensor, "B H T S"], view: View) -> Float[Tensor, "B H T S"]:
    """Return scores + position bias."""
    bias = position_bias(view)
    return scores if bias is None else scores + bias.to(scores.dtype)


def check_shared_sizes(position: Position | None, site: Site, own: Site, kv_heads: int) -> None:
    """Raise a `SpecError` if the head sizes of an attention layer do not fit its position scheme.

    `position` is the scheme of the layer, by default that of the stack. `site` has the head sizes of the stack, and
    `own` has those of the layer.
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
