"""Base classes of stacks: how blocks are combined into an encoder or a decoder."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.attention_heads import check_pattern
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec, Shared
from regard.nn.cache import Rows
from regard.nn.checks import require
from regard.nn.core import Site, build_optional
from regard.nn.mask import Context
from regard.nn.position.base import AtHeads, Position, PositionTerms
from regard.tree import Spec, walk


def check_stack(spec: Any, pattern: tuple[Block, ...], built: int | None = None) -> None:
    """Raise a `SpecError` for a stack without blocks, or for options of attention if no block has attention.

    `built` is the number of blocks that are built, or None for any number. All blocks of `pattern` must be built.
    """
    blocks = len(pattern)
    require(blocks > 0, "pattern", "a stack needs at least one block")
    unused = f"has {blocks} blocks, of which only the first {built} would be used"
    require(built is None or blocks <= built, "pattern", unused)
    require(
        len({other.heads for other in spec.positions}) == len(spec.positions),
        "positions",
        "two position schemes are for the same number of heads; keep one",
    )
    attending = [part for part in walk(spec) if isinstance(part, BranchSpec) and part.attends]
    for part in attending:
        for name in () if part.masked else ("attention_pattern", "strict"):
            require(
                not getattr(spec, name, None),
                name,
                f"{part.kind!r} has no such mask; leave it out, or set attention_pattern in the self_attention layers",
            )
    if attending:
        ignored = all(getattr(part, "attention_pattern", None) is not None for part in attending)
        require(
            not ignored or spec.attention_pattern is None,
            "attention_pattern",
            "every attention layer of this stack has a pattern of its own, so it would be ignored; leave it out",
        )
        return
    for name in ("position", "positions", "attention_pattern", "strict"):
        require(
            not getattr(spec, name, None),
            name,
            "no branch of this stack attends to other tokens, so it would be ignored; leave it out",
        )


def check_shared(position: Position | None, positions: tuple[AtHeads, ...], spec: Spec, site: Site) -> None:
    """Raise a `SpecError` if no layer uses a position scheme of the stack, because it would not be trained.

    An attention layer uses the scheme of the stack for its number of heads, unless the layer has its own scheme.
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
            f"no attention of this stack uses a position for {other.heads} heads (heads: {heads}), so it would be "
            "built and ignored; leave it out",
        )
    if position is not None and not users - {other.heads for other in positions}:
        why = "`positions` has one for all of them" if users else "each has a position of its own"
        raise site.error(
            "position", f"no attention of this stack uses it ({why}), so it would be built and ignored; leave it out"
        )


def stack_site(spec: Any, site: Site) -> Site:
    """Return the `Site` for the layers of a stack, with the depth of the stack and its position schemes."""
    site.require(
        site.causal or not getattr(spec, "strict", False),
        "strict",
        "only a causal stack can be strictly causal; leave it false here",
    )
    check_pattern(spec.attention_pattern, site)
    check_shared(spec.position, spec.positions, spec, site)
    others = {other.heads: other.position for other in spec.positions}
    pattern = getattr(spec, "attention_pattern", None)
    return replace(site, depth=spec.blocks(), position=spec.position, positions=others, attention_pattern=pattern)


@dataclass(frozen=True, slots=True)
class StackOut:
    """The output `x` of a stack and the segment of each output token (0: padding). A stack may shorten texts."""

    x: Float[Tensor, "B T2 D"]
    seg: Int[Tensor, "B T2"] | None
    layers: tuple[Float[Tensor, "B _ D"], ...] = ()  # with `keep`: hidden states before the first and after each block


class StackSpec(Spec):
    """Abstract base class of specs for stacks: how blocks are combined into an encoder or a decoder."""

    __slots__ = ()
    shortens: ClassVar[bool] = False  # whether the output is shorter than the input
    ordered: ClassVar[bool] = False  # whether token order matters even if the blocks do not depend on it

    @abstractmethod
    def blocks(self) -> int:
        """Return the depth: the number of blocks that are applied, counting repeated applications of one block."""

    @abstractmethod
    def block_of(self, call: int) -> Block:
        """Return the spec of the block at depth `call`, counted from 0."""

    def residual_branches(self) -> int:
        """Return the number of residual branches in all blocks. Fixup scales initial weights by this number."""
        return sum(len(self.block_of(call).branches) for call in range(self.blocks()))

    @abstractmethod
    def build(self, site: Site) -> "Stack":
        """Build the stack with the sizes and weight factories of `site`."""


class Stack(nn.Module):
    """Abstract base class of stacks. `positions` has the position schemes of layers with other head counts."""

    position: PositionTerms | None
    positions: Any  # nn.ModuleDict
    shared: Any  # nn.ModuleDict: modules that several layers share, by kind of layer

    __call__: Callable[..., StackOut]

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None = None, keep: bool = False
    ) -> StackOut:
        """Return the output of the last block and, if `keep`, the hidden states before and after each block."""

    @abstractmethod
    def start(self, rows: Rows, ctx: Context) -> list[Any]:
        """Return new decoding states, one per applied block."""


def shared_positions(
    position: Position | None, positions: tuple[AtHeads, ...], site: Site
) -> tuple[PositionTerms | None, nn.ModuleDict]:
    """Build the position scheme of the stack, and its other schemes, which are keyed by number of heads."""
    others = {
        str(other.heads): other.position.build(site.inside(f"positions[{i}].position", heads=other.heads))
        for i, other in enumerate(positions)
    }
    return build_optional(position, site.inside("position")), nn.ModuleDict(others)


def shared_modules(spec: Spec, site: Site) -> nn.ModuleDict:
    """Build the modules that layers of the stack `spec` share, by kind of layer. Each is in the model only once."""
    described: dict[str, Shared] = {}
    for part in walk(spec):
        shared = part.shared() if isinstance(part, BranchSpec) else None
        if shared is not None:
            site.require(
                described.setdefault(part.kind, shared) == shared,
                "",
                f"the {part.kind!r} layers of this stack share one module, but one has {described[part.kind]} and "
                f"another {shared}; give them equal sizes",
            )
    return nn.ModuleDict({kind: shared.build(site.inside("shared")) for kind, shared in described.items()})
