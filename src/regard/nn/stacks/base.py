"""Stack slot: one side of a model."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.branches.base import BranchSpec
from regard.nn.core import Context, Site, View
from regard.nn.pattern import AttentionPattern
from regard.nn.position.base import AtHeads, Position, PositionTerms, places
from regard.nn.state import Rows
from regard.tree import Spec, walk


def check_seen(spec: Spec) -> None:
    """Refuse a position, a sight or strictness where no branch looks at other tokens: it would be ignored."""
    if any(isinstance(part, BranchSpec) and part.looks for part in walk(spec)):
        return
    for name in ("position", "positions", "attention_pattern", "strict"):
        if getattr(spec, name, None):
            raise SpecError(name, "no branch of this stack looks at other tokens, so it would be ignored; leave it out")


def check_shared(position: Position | None, positions: tuple[AtHeads, ...], spec: Spec, site: Site) -> None:
    """Refuse a position of a stack that none of its attentions takes: it would be built, counted and ignored.

    An attention takes the stack's position for its number of heads, unless it has one of its own.
    """
    takers = {
        getattr(part, "heads", None) or site.heads
        for part in walk(spec)
        if isinstance(part, BranchSpec) and part.looks and getattr(part, "position", None) is None
    }
    shown = ", ".join(map(str, sorted(takers))) or "none without a position of its own"
    for i, other in enumerate(positions):
        if other.heads not in takers:
            raise site.error(
                f"positions[{i}].heads",
                f"no attention of this stack takes a position for {other.heads} heads (heads: {shown}), so it would be "
                "built and ignored; leave it out",
            )
    if position is not None and not takers - {other.heads for other in positions}:
        why = "`positions` has one for all of them" if takers else "each has a position of its own"
        raise site.error(
            "position", f"no attention of this stack takes it ({why}), so it would be built and ignored; leave it out"
        )


@dataclass(frozen=True, slots=True)
class StackOut:
    """What a stack leaves. It may have shortened the sequence; `seg` says what is left of it."""

    x: Float[Tensor, "B T2 D"]
    seg: Int[Tensor, "B T2"] | None
    layers: tuple[Float[Tensor, "B T D"], ...] = ()  # the stream before the first block and after each, if asked for


class StackSpec(Spec):
    """Slot: describes the wiring of blocks."""

    __slots__ = ()
    shortens: ClassVar[bool] = False  # it leaves fewer vectors than it was given
    ordered: ClassVar[bool] = False  # the order of tokens matters to the wiring itself, whatever the blocks are

    @abstractmethod
    def blocks(self) -> int:
        """How many block calls deep the stack is."""

    @abstractmethod
    def residual_branches(self) -> int:
        """How many residual branches a token passes: DeepNorm and Fixup scale by it."""

    @abstractmethod
    def build(self, site: Site) -> "Stack":
        """The stack at this site."""


class Stack(nn.Module):
    """Abstract: runs blocks over the stream."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, ctx: Context, state: list[Any] | None = None, keep: bool = False) -> StackOut: ...

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None = None, keep: bool = False
    ) -> StackOut:
        """Run all blocks; `keep` also returns the stream between them."""

    @abstractmethod
    def start(self, rows: Rows, ctx: Context) -> list[Any]:
        """A state for every call in a new decoding."""


def prepare(
    view: View,
    position: PositionTerms | None,
    attention_pattern: AttentionPattern | None = None,
    strict: bool = False,
    others: Mapping[int, PositionTerms] | None = None,
) -> View:
    """The view of a stack's layers: the mask with the stack's sight, and its position terms. Once per forward pass.

    `others` are positions for attentions of another number of heads than the model's.
    """
    if view.beams is not None:
        view = replace(view, beams=prepare(view.beams, position, attention_pattern, strict, others))
    if attention_pattern is not None or strict:
        view = replace(
            view, mask=replace(view.mask, attention_pattern=attention_pattern, strict=strict), lowered={}, shared={}
        )
    main = view if position is None else view.with_terms(position(places(view)))
    if not others:
        return main
    return replace(main, others={heads: view.with_terms(other(places(view))) for heads, other in others.items()})


def shared_positions(
    position: Position | None, positions: tuple[AtHeads, ...], site: Site
) -> tuple[PositionTerms | None, nn.ModuleDict]:
    """The modules of what a stack's layers share: the position, and those for other numbers of heads by that number."""
    others = {
        str(other.heads): other.position.build(site.inside(f"positions[{i}].position", heads=other.heads))
        for i, other in enumerate(positions)
    }
    return None if position is None else position.build(site.inside("position")), nn.ModuleDict(others)
