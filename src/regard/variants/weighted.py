"""Row 51 of Narang et al. 2021: the Weighted Transformer, which sums heads that pass through a feed-forward layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.branches.weighted import Weighted, WeightedSimplex
from regard.tree import swap
from regard.variants.base import Edit, Variant

Attention = SelfAttention | CrossAttention
Make = Callable[[Any, Attention, FeedForward], BranchSpec]


def branched(make: Make) -> Edit:
    """Return a function that moves the feed-forward layer of a block into each attention layer of the block."""

    def edit(m: Any) -> Any:
        def moved(block: Block) -> Block:
            if not any(isinstance(branch, Attention) for branch in block.branches):
                return block
            feedforwards = [branch for branch in block.branches if isinstance(branch, FeedForward)]
            other = [branch for branch in block.branches if not isinstance(branch, FeedForward | Attention)]
            if len(feedforwards) != 1 or other:
                raise SpecError(
                    "branches", "a weighted transformer needs blocks of attention and one feed-forward layer"
                )
            branches, rules = [], []
            for branch, rule in zip(block.branches, block.rules(), strict=True):
                if isinstance(branch, Attention):
                    branches.append(make(m, replace(branch, output=False), feedforwards[0]))
                    rules.append(rule)
            residual = tuple(rules) if isinstance(block.residual, tuple) else block.residual
            return Block(tuple(branches), residual)

        return swap(m, Block, moved)

    return edit


def _as_run(m: Any, attention: Attention, feedforward: FeedForward) -> BranchSpec:  # noqa: ARG001
    return Weighted(attention, feedforward)


def _of_paper(m: Any, attention: Attention, feedforward: FeedForward) -> BranchSpec:
    """Return the layer of the original paper, in which the hidden width is divided among the heads."""
    hidden, heads = feedforward.d_hidden or 4 * m.d_model, attention.heads or m.heads
    return WeightedSimplex(attention, replace(feedforward, d_hidden=max(1, hidden // heads)))


AHMED = "Ahmed et al. 2017"

VARIANTS = {
    "weighted": Variant(
        branched(_as_run),
        "attention",
        "a weighted sum of heads, each through the feed-forward layer; unconstrained weights",
        AHMED,
    ),
    "weighted_ahmed": Variant(
        branched(_of_paper),
        "attention",
        "a weighted sum of heads, each through its own feed-forward layer; weights sum to one",
        AHMED,
    ),
}
