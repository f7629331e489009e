"""Stack slot: the layers of an encoder or a decoder."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import Rows
from regard.nn.checks import require
from regard.nn.core import Site, build_optional
from regard.nn.mask import Context
from regard.nn.position.base import AtHeads, Position, PositionTerms
from regard.tree import Spec, walk


def check_stack(spec: Any, pattern: tuple[Block, ...]) -> None:
    """Refuse a stack without blocks, and positions, patterns or `strict` where they would be ignored."""
    require(len(pattern) > 0, "pattern", "a stack needs at least one block")
    require(
        len({other.heads for other in spec.positions}) == len(spec.positions),
        "positions",
        "two of them are for the same number of heads; keep one",
    )
    if any(isinstance(part, BranchSpec) and part.attends for part in walk(spec)):
        return
    for name in ("position", "positions", "attention_pattern", "strict"):
        require(
            not getattr(spec, name, None),
            name,
            "no branch of this stack attends to other tokens, so it would be ignored; leave it out",
        )


def check_shared(position: Position | None, positions: tuple[AtHeads, ...], spec: Spec, site: Site) -> None:
    """Refuse a position of a stack that no attention uses: its parameters would be counted and not trained.

    An attention uses the stack's position for its number of heads, unless it has a position of its own.
    """
    users = {
        getattr(part, "heads", None) or site.heads
        for part in walk(spec)
        if isinstance(part, BranchSpec) and part.attends and getattr(part, "position", None) is None
    }
    heads = ", ".join(map(str, sorted(users))) or "none without a position of its own"
    for i, other in enumerate(positions):
        site.require(
            other.heads in users,
            f"positions[{i}].heads",
            f"no attention of this stack takes a position for {other.heads} heads (heads: {heads}), so it would be "
            "built and ignored; leave it out",
        )
    if position is not None and not users - {other.heads for other in positions}:
        why = "`positions` has one for all of them" if users else "each has a position of its own"
        raise site.error(
            "position", f"no attention of this stack takes it ({why}), so it would be built and ignored; leave it out"
        )


def stack_site(spec: Any, site: Site) -> Site:
    """Return the site of a stack's layers, with its depth and their shared positions."""
    site.require(
        site.causal or not getattr(spec, "strict", False),
        "strict",
        "only a causal stack can be strictly causal; leave it false here",
    )
    check_shared(spec.position, spec.positions, spec, site)
    others = {other.heads: other.position for other in spec.positions}
    return replace(site, depth=spec.blocks(), position=spec.position, positions=others)


@dataclass(frozen=True, slots=True)
class StackOut:
    """The output of a stack, with its segments `seg`, as a stack may shorten the sequence."""

    x: Float[Tensor, "B T2 D"]
    seg: Int[Tensor, "B T2"] | None
    layers: tuple[Float[Tensor, "B _ D"], ...] = ()  # with `keep`: the stream before the first block and after each


class StackSpec(Spec):
    """Slot: describes the wiring of blocks."""

    __slots__ = ()
    shortens: ClassVar[bool] = False  # the output is shorter than the input
    ordered: ClassVar[bool] = False  # depends on the order of tokens, for any blocks

    @abstractmethod
    def blocks(self) -> int:
        """Return the number of block calls."""

    @abstractmethod
    def block_of(self, call: int) -> Block:
        """Return the description of the block of a call."""

    def residual_branches(self) -> int:
        """Return the number of residual branches that a token passes, by which DeepNorm and Fixup scale."""
        return sum(len(self.block_of(call).branches) for call in range(self.blocks()))

    @abstractmethod
    def build(self, site: Site) -> "Stack":
        """Build the stack at this site."""


class Stack(nn.Module):
    """Abstract: a sequence of blocks. `positions` are for attentions with another number of heads."""

    position: PositionTerms | None
    positions: Any  # nn.ModuleDict

    __call__: Callable[..., StackOut]

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None = None, keep: bool = False
    ) -> StackOut:
        """Run all blocks; with `keep`, return the stream between them too."""

    @abstractmethod
    def start(self, rows: Rows, ctx: Context) -> list[Any]:
        """Return the states of all calls for a new decoding."""


def shared_positions(
    position: Position | None, positions: tuple[AtHeads, ...], site: Site
) -> tuple[PositionTerms | None, nn.ModuleDict]:
    """Build the positions that a stack's layers share: the default one, and others by their number of heads."""
    others = {
        str(other.heads): other.position.build(site.inside(f"positions[{i}].position", heads=other.heads))
        for i, other in enumerate(positions)
    }
    return build_optional(position, site.inside("position")), nn.ModuleDict(others)
