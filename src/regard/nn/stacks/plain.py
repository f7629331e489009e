"""The ordinary stack: blocks one after the other."""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.block import Block
from regard.nn.core import MOST_BLOCKS, Site, check_count
from regard.nn.mask import Context
from regard.nn.pattern import AttentionPattern
from regard.nn.position.base import AtHeads, Position, PositionTerms
from regard.nn.stacks.base import Stack, StackOut, StackSpec, check_seen, check_shared, shared_positions
from regard.nn.state import Rows


@dataclass(frozen=True, slots=True)
class Plain(StackSpec):
    """`depth` calls of blocks tiled from `pattern`.

    With `unique` below `depth`, only that many blocks exist and call n runs block n % unique: block sharing (Lan et al.
    2020, ALBERT). Each call keeps its own decode state.
    """

    kind = "plain"
    pattern: tuple[Block, ...]
    depth: int = 6
    unique: int | None = None  # None: depth
    position: Position | None = None  # shared by all layers
    attention_pattern: AttentionPattern | None = None
    strict: bool = False  # a token does not see itself, as COMP7607 writes the mask
    positions: tuple[AtHeads, ...] = ()  # as `position`, for attentions of another number of heads than the model's

    def check(self) -> None:
        check_count("depth", self.depth, MOST_BLOCKS)
        if not self.pattern:
            raise SpecError("pattern", "a stack needs at least one block")
        if self.unique is not None and not 1 <= self.unique <= self.depth:
            raise SpecError("unique", f"must lie between 1 and the depth {self.depth}, not {self.unique}")
        built = self.unique or self.depth
        if len(self.pattern) > built:
            raise SpecError("pattern", f"has {len(self.pattern)} blocks, of which only {built} would ever run")
        if len({other.heads for other in self.positions}) < len(self.positions):
            raise SpecError("positions", "two of them are for the same number of heads; keep one")
        check_seen(self)

    def block(self, call: int) -> Block:
        """The description of the block that call n runs."""
        return self.pattern[self._parameters(call) % len(self.pattern)]

    def _parameters(self, call: int) -> int:
        return call % (self.unique or self.depth)

    def blocks(self) -> int:
        return self.depth

    def residual_branches(self) -> int:
        return sum(len(self.block(call).branches) for call in range(self.depth))

    def build(self, site: Site) -> Stack:
        if self.strict and not site.causal:
            raise site.error("strict", "only a causal stack can be strictly causal; leave it false here")
        check_shared(self.position, self.positions, self, site)
        others = {other.heads: other.position for other in self.positions}
        site = replace(site, depth=self.depth, position=self.position, positions=others)
        blocks = []
        for i in range(self.unique or self.depth):
            where = f"pattern[{i % len(self.pattern)}]"
            blocks.append(self.block(i).build(site.inside(where, layer=i)))
        last = self.block(self.depth - 1).rules()[-1]
        shared = shared_positions(self.position, self.positions, site)
        return PlainModule(self, blocks, *shared, last.end(site.inside("pattern[-1].residual")))


class PlainModule(Stack):
    def __init__(
        self,
        spec: Plain,
        blocks: list[nn.Module],
        position: PositionTerms | None,
        positions: nn.ModuleDict,
        end: nn.Module,
    ) -> None:
        super().__init__()
        self.position = position
        self.positions = positions
        self.blocks = nn.ModuleList(blocks)
        self.end = end
        self.plan = [call % len(blocks) for call in range(spec.depth)]
        self.attention_pattern, self.strict = spec.attention_pattern, spec.strict

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None = None, keep: bool = False
    ) -> StackOut:
        view = ctx.own.with_mask(attention_pattern=self.attention_pattern, strict=self.strict)
        ctx = replace(ctx, own=self.with_positions(view))
        layers = [x]
        for call, block in enumerate(self.plan):
            x = self.blocks[block](x, ctx.block(call), None if state is None else state[call])
            if keep:
                layers.append(x)
        x = self.end(x)
        return StackOut(x, ctx.own.mask.q_seg, (*layers[:-1], x) if keep else ())

    def start(self, rows: Rows, ctx: Context) -> list[Any]:
        return [self.blocks[block].start(rows, ctx.block(call)) for call, block in enumerate(self.plan)]  # type: ignore[reportCallIssue]
