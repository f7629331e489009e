"""The Transformer without one of its parts, to measure how much each part contributes."""

from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.feedforward import FeedForward
from regard.nn.no_residual import NoResidual
from regard.nn.norm import NoNorm, Norm
from regard.nn.residual import Residual
from regard.tree import swap, walk
from regard.variants.base import Variant, check_attention, swap_attention


def no_scaling(m: Any) -> Any:
    """Use softmax(q k') instead of softmax(q k' / sqrt(d_head)).

    Raises an error for T5, which has no divisor and uses smaller initial query weights instead.
    """

    def plain(branch: Any) -> Any:
        return replace(branch, scale="none") if getattr(branch, "scale", "none") != "none" else branch

    return swap(m, BranchSpec, plain)


def one_head(m: Any) -> Any:
    """Use one head that is as wide as all heads together, so that the projections have the same sizes as before."""

    def single(attention: Any) -> Any:
        heads = attention.heads or m.heads
        if heads == 1:
            return attention
        if (attention.kv_heads or heads) != heads:
            problem = "cannot be combined with one head, which would have more parameters"
            raise SpecError("kv_heads", f"{problem}; leave it out")
        own = {name: heads * size for name in ("d_head", "d_value") if (size := getattr(attention, name)) is not None}
        return replace(attention, heads=None if attention.heads is None else 1, kv_heads=None, **own)

    check_attention(m, "heads to merge")
    merged = swap_attention(m, single)
    if m.heads == 1:
        return merged
    return replace(merged, heads=1, d_head=None if m.d_head is None else m.heads * m.d_head)


def no_residual(m: Any) -> Any:
    """Use f(norm(x)) instead of x + f(norm(x)), also in post-norm models."""

    def replaced(rule: Residual) -> Residual:
        return rule if isinstance(rule, NoResidual) else NoResidual(getattr(rule, "norm", NoNorm()))

    return swap(m, Residual, replaced)


def no_norm(m: Any) -> Any:
    """Remove all norms, so that a residual branch computes x + f(x)."""
    return swap(m, Norm, lambda _: NoNorm())


def no_feed_forward(m: Any) -> Any:
    """Remove all feed-forward layers."""

    def attention_only(block: Block) -> Block:
        kept = [i for i, branch in enumerate(block.branches) if not isinstance(branch, FeedForward)]
        if len(kept) == len(block.branches):
            return block
        if not kept:
            problem = "a block has only a feed-forward layer"
            raise SpecError("branches", f"{problem}; choose a base with attention in every block")
        rules = block.residual
        if isinstance(rules, tuple):
            rules = tuple(rules[i] for i in kept)
        return replace(block, branches=tuple(block.branches[i] for i in kept), residual=rules)

    result = swap(m, Block, attention_only)
    if any(isinstance(part, FeedForward) for part in walk(result)):
        raise SpecError("variants", "a feed-forward layer is part of another layer and cannot be removed; leave it out")
    return result


VASWANI = "Vaswani et al. 2017"

VARIANTS = {
    "no_scaling": Variant(no_scaling, "without", "attention scores without the factor 1 / sqrt(d_head)", VASWANI),
    "one_head": Variant(one_head, "without", "one head, as wide as all heads together", VASWANI),
    "no_residual": Variant(no_residual, "without", "f(norm(x)) without residual connections", "He et al. 2016"),
    "no_norm": Variant(no_norm, "without", "x + f(x) without any norm", "Xiong et al. 2020"),
    "no_feed_forward": Variant(no_feed_forward, "without", "blocks of attention alone", "Dong et al. 2021"),
}
