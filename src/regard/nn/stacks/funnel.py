"""The funnel stack: an encoder that shortens the sequence."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import DataError, SpecError
from regard.nn.block import Block, BlockModule
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import Rows
from regard.nn.checks import MOST_BLOCKS, check_count, require
from regard.nn.core import Site
from regard.nn.mask import Context, Mask, View
from regard.nn.pattern import AttentionPattern
from regard.nn.position.base import AtHeads, Position
from regard.nn.stacks.base import Stack, StackOut, StackSpec, check_stack, shared_modules, shared_positions, stack_site
from regard.tree import walk


@dataclass(frozen=True, slots=True)
class Funnel(StackSpec):
    """Groups of layers; each group except the first halves the sequence length. Dai et al. 2020, Narang et al. 2021.

    In the first layer of each such group, pairs of neighbouring tokens are mean-pooled after the first branch
    (self-attention and its residual connection). The positions of the pooled tokens start at 0 again.

    Differs from Dai et al., who pool only the queries of this self-attention.
    """

    kind = "funnel"
    shortens: ClassVar[bool] = True
    ordered: ClassVar[bool] = True
    pattern: tuple[Block, ...]
    layers: tuple[int, ...] = (4, 4, 4)  # per group; blocks repeat `pattern` over all groups
    position: Position | None = None  # shared by all layers
    positions: tuple[AtHeads, ...] = ()
    attention_pattern: AttentionPattern | None = None

    def check(self) -> None:
        require(
            min(self.layers, default=0) >= 1, "layers", f"every group needs at least 1 layer, not {list(self.layers)}"
        )
        check_count("layers", sum(self.layers), MOST_BLOCKS)
        for i, block in enumerate(self.pattern):
            if not any(isinstance(part, BranchSpec) and part.attends for part in walk(block.branches[0])):
                raise SpecError(
                    f"pattern[{i}].branches", "a funnel halves the sequence after self-attention, which must come first"
                )
        check_stack(self, self.pattern)

    def block_of(self, call: int) -> Block:
        return self.pattern[call % len(self.pattern)]

    def blocks(self) -> int:
        return sum(self.layers)

    def build(self, site: Site) -> Stack:
        site.require(
            not site.causal,
            "kind",
            "a funnel pools neighbouring tokens, so a token would depend on the next; use it in an encoder",
        )
        return FunnelModule(self, stack_site(self, site))


class FunnelModule(Stack):
    def __init__(self, spec: Funnel, site: Site) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            spec.block_of(i).build(site.inside(f"pattern[{i % len(spec.pattern)}]", layer=i))
            for i in range(spec.blocks())
        )
        self.position, self.positions = shared_positions(spec.position, spec.positions, site)
        self.shared = shared_modules(spec, site)
        self.end = spec.block_of(spec.blocks() - 1).rules()[-1].end(site.inside("pattern[-1].residual"))
        self.halving = {sum(spec.layers[:group]) for group in range(1, len(spec.layers))}
        self.attention_pattern, self.site = spec.attention_pattern, site

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None = None, keep: bool = False
    ) -> StackOut:
        if ctx.own.mask.packed:
            raise DataError("packed: a funnel would pool tokens of different texts; use padded batches")
        if state is not None:
            raise self.site.error("kind", "a funnel needs the whole sequence and cannot decode; use it in an encoder")
        ctx = replace(ctx, own=self.viewed(ctx.own), shared=self.shared)
        layers = [x]
        for call, block in enumerate(self.blocks):
            assert isinstance(block, BlockModule)
            if call in self.halving:
                first, *rest = block.branches
                x, seg = halved(first(x, ctx), ctx.own.mask.q_seg)
                T = x.shape[1]
                ctx = replace(ctx, own=self.viewed(View(Mask(q_seg=seg, k_seg=seg), T, T, x.device)))
                for branch in rest:
                    x = branch(x, ctx)
            else:
                x = block(x, ctx)
            if keep:
                layers.append(x)
        x = self.end(x)
        return StackOut(x, ctx.own.mask.q_seg, (*layers[:-1], x) if keep else ())

    def viewed(self, view: View) -> View:
        """Return a copy of the view with the attention pattern and the position terms of the stack."""
        view = view.with_mask(attention_pattern=self.attention_pattern)
        return view.with_positions(self.position, self.positions)

    def start(self, rows: Rows, ctx: Context) -> list[Any]:  # noqa: ARG002
        raise self.site.error("kind", "a funnel needs the whole sequence and cannot decode; use it in an encoder")


def halved(
    x: Float[Tensor, "B T D"], seg: Int[Tensor, "B T"] | None
) -> tuple[Float[Tensor, "B T2 D"], Int[Tensor, "B T2"] | None]:
    """Return the means of pairs of neighbouring tokens, and the segment of each pair (0: padding).

    A last token without a neighbour is unchanged. The means exclude padding. In Narang et al. 2021 they include
    padding, so that the output depends on the padded length.
    """
    if x.shape[1] % 2:
        x = torch.cat((x, x[:, -1:]), 1)
        seg = None if seg is None else torch.cat((seg, seg[:, -1:]), 1)
    pairs = x.unflatten(1, (-1, 2))
    if seg is None:
        return pairs.mean(2), None
    real = (seg != 0).unflatten(1, (-1, 2))[..., None]
    return pairs.masked_fill(~real, 0.0).sum(2) / real.sum(2).clamp(min=1), seg[:, ::2]
