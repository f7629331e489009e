"""Stack slot: one side of a model."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.checks import require
from regard.nn.core import Site, build_optional
from regard.nn.mask import Context
from regard.nn.position.base import AtHeads, Position, PositionTerms
from regard.nn.state import Rows
from regard.tree import Spec, walk


def check_stack(spec: Any, pattern: tuple[Block, ...]) -> None:
    """Refuse a stack without blocks, and positions, patterns or strictness that would be ignored."""
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
    """Refuse a position of a stack that none of its attentions takes: it would be built, counted and ignored.

    An attention takes the stack's position for its number of heads, unless it has one of its own.
    """
    takers = {
        getattr(part, "heads", None) or site.heads
        for part in walk(spec)
        if isinstance(part, BranchSpec) and part.attends and getattr(part, "position", None) is None
    }
    shown = ", ".join(map(str, sorted(takers))) or "none without a position of its own"
    for i, other in enumerate(positions):
        site.require(
            other.heads in takers,
            f"positions[{i}].heads",
            f"no attention of this stack takes a position for {other.heads} heads (heads: {shown}), so it would be "
            "built and ignored; leave it out",
        )
    if position is not None and not takers - {other.heads for other in positions}:
        why = "`positions` has one for all of them" if takers else "each has a position of its own"
        raise site.error(
            "position", f"no attention of this stack takes it ({why}), so it would be built and ignored; leave it out"
        )


def stack_site(spec: Any, site: Site) -> Site:
    """The site of a stack's layers: its depth, and the positions that they share."""
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
    """What a stack leaves. It may have shortened the sequence; `seg` says what is left of it."""

    x: Float[Tensor, "B T2 D"]
    seg: Int[Tensor, "B T2"] | None
    layers: tuple[Float[Tensor, "B _ D"], ...] = ()  # the stream before the first block and after each, if asked for


class StackSpec(Spec):
    """Slot: describes the wiring of blocks."""

    __slots__ = ()
    shortens: ClassVar[bool] = False  # it leaves fewer vectors than it was given
    ordered: ClassVar[bool] = False  # the order of tokens matters to the wiring itself, whatever the blocks are

    @abstractmethod
    def blocks(self) -> int:
        """The number of block calls."""

    @abstractmethod
    def block_of(self, call: int) -> Block:
        """The description of the block that call n runs."""

    def residual_branches(self) -> int:
        """The number of residual branches that a token passes: DeepNorm and Fixup scale by it."""
        return sum(len(self.block_of(call).branches) for call in range(self.blocks()))

    @abstractmethod
    def build(self, site: Site) -> "Stack":
        """The stack at this site."""


class Stack(nn.Module):
    """Abstract: runs blocks one after the other. `positions` are those for attentions of another number of heads."""

    position: PositionTerms | None
    positions: Any  # nn.ModuleDict

    __call__: Callable[..., StackOut]

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None = None, keep: bool = False
    ) -> StackOut:
        """Run all blocks; `keep` also returns the stream between them."""

    @abstractmethod
    def start(self, rows: Rows, ctx: Context) -> list[Any]:
        """A state for every call in a new decoding."""


def shared_positions(
    position: Position | None, positions: tuple[AtHeads, ...], site: Site
) -> tuple[PositionTerms | None, nn.ModuleDict]:
    """The modules of what a stack's layers share: the position, and those for other numbers of heads by that number."""
    others = {
        str(other.heads): other.position.build(site.inside(f"positions[{i}].position", heads=other.heads))
        for i, other in enumerate(positions)
    }
    return build_optional(position, site.inside("position")), nn.ModuleDict(others)
