"""The ordinary stack: a sequence of blocks."""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.block import Block, state_at
from regard.nn.cache import Rows
from regard.nn.checks import MOST_BLOCKS, check_count
from regard.nn.core import Site
from regard.nn.mask import Context
from regard.nn.pattern import AttentionPattern
from regard.nn.position.base import AtHeads, Position
from regard.nn.stacks.base import Stack, StackOut, StackSpec, check_stack, shared_modules, shared_positions, stack_site


@dataclass(frozen=True, slots=True)
class Plain(StackSpec):
    """A sequence of `depth` blocks, in which the blocks of `pattern` repeat.

    If `unique` is below `depth`, layers share parameters: layer n is block n % unique (Lan et al. 2020, ALBERT).
    """

    kind = "plain"
    pattern: tuple[Block, ...]
    depth: int = 6
    unique: int | None = None  # None: depth
    position: Position | None = None  # shared by all layers
    attention_pattern: AttentionPattern | None = None
    strict: bool = False  # whether a token does not attend to itself, as in COMP7607
    positions: tuple[AtHeads, ...] = ()  # for attention layers with other numbers of heads

    def check(self) -> None:
        check_count("depth", self.depth, MOST_BLOCKS)
        check_count("unique", self.unique, self.depth)
        check_stack(self, self.pattern, self.unique or self.depth)

    def block_of(self, call: int) -> Block:
        return self.pattern[call % (self.unique or self.depth) % len(self.pattern)]

    def blocks(self) -> int:
        return self.depth

    def build(self, site: Site) -> Stack:
        return PlainModule(self, stack_site(self, site))


class PlainModule(Stack):
    def __init__(self, spec: Plain, site: Site) -> None:
        super().__init__()
        number, tiles = spec.unique or spec.depth, len(spec.pattern)
        self.blocks = nn.ModuleList(
            spec.block_of(i).build(site.inside(f"pattern[{i % tiles}]", layer=i)) for i in range(number)
        )
        self.position, self.positions = shared_positions(spec.position, spec.positions, site)
        self.shared = shared_modules(spec, site)
        self.end = spec.block_of(spec.depth - 1).rules()[-1].end(site.inside("pattern[-1].residual"))
        self.plan = [call % number for call in range(spec.depth)]
        self.attention_pattern, self.strict = spec.attention_pattern, spec.strict

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None = None, keep: bool = False
    ) -> StackOut:
        ctx = self.context(ctx)
        layers = [x]
        for call, block in enumerate(self.plan):
            x = self.blocks[block](x, ctx.block(call), state_at(state, call))
            if keep:
                layers.append(x)
        x = self.end(x)
        return StackOut(x, ctx.own.mask.q_seg, (*layers[:-1], x) if keep else ())

    def context(self, ctx: Context) -> Context:
        """Return `ctx` with the attention pattern, the position terms and the shared modules of this stack."""
        view = ctx.own.with_mask(attention_pattern=self.attention_pattern, strict=self.strict)
        return replace(ctx, own=view.with_positions(self.position, self.positions), shared=self.shared)

    def start(self, rows: Rows, ctx: Context) -> list[Any]:
        ctx = self.context(ctx)
        return [self.blocks[block].start(rows, ctx.block(call)) for call, block in enumerate(self.plan)]  # type: ignore[reportCallIssue]
