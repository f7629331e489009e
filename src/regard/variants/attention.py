"""Attention beyond the table: fewer keys and values, a narrower sight, norms, branches side by side."""

from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.parallel import Parallel
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.pattern import Window
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.base import StackSpec
from regard.tree import hints, swap, walk
from regard.variants.base import Variant


def parallel(m: Any) -> Any:
    """The branches of a block read the same input, and their sum joins the stream: one residual branch per block."""

    def side_by_side(block: Block) -> Block:
        if len(block.branches) == 1:
            return block
        rules = block.rules()
        if len(set(rules)) > 1:
            raise SpecError(
                "residual", "branches that join the stream in different ways cannot be one; choose one rule"
            )
        return Block((Parallel(block.branches),), rules[0])

    return swap(m, Block, side_by_side)


def grouped_query(m: Any) -> Any:
    """Ainslie et al. 2023: in a decoder, where keys and values are kept, four heads share one of each.

    As the paper has it, an encoder stays as it is. Where four do not divide the heads, the nearest divisor of them.
    """
    if getattr(m, "decoder", None) is None:
        return m
    _check_attention(m.decoder)

    def grouped(attention: Any) -> Any:
        heads = attention.heads or m.heads
        return _with_groups(attention, heads, min(_divisors(heads), key=lambda groups: abs(groups - heads / 4)))

    return replace(m, decoder=swap(swap(m.decoder, SelfAttention, grouped), CrossAttention, grouped))


def multi_query(m: Any) -> Any:
    """Shazeer 2019: all heads of every attention share one key and one value."""
    _check_attention(m)

    def single(attention: Any) -> Any:
        return _with_groups(attention, attention.heads or m.heads, 1)

    return swap(swap(m, SelfAttention, single), CrossAttention, single)


def _check_attention(m: Any) -> None:
    """Refuse what would be changed in part: what looks at other tokens without queries and keys of this kind."""
    for part in walk(m):
        if isinstance(part, BranchSpec) and part.attends and not isinstance(part, SelfAttention):
            raise SpecError("variants", f"{part.kind!r} has no queries and keys that could be changed")


def _divisors(heads: int) -> list[int]:
    """From many to few, so that of two equally near ones the larger is found first."""
    return [groups for groups in range(heads, 0, -1) if heads % groups == 0]


def _with_groups(attention: Any, heads: int, groups: int) -> Any:
    return attention if (attention.kv_heads or heads) == groups else replace(attention, kv_heads=groups)


def sliding_window(m: Any) -> Any:
    """Beltagy et al. 2020: a token sees itself and 255 tokens on either side, as far as it may."""

    def narrowed(stack: Any) -> Any:
        attends = any(isinstance(part, SelfAttention) for part in walk(stack))
        return (
            replace(stack, attention_pattern=Window(256))
            if attends and "attention_pattern" in hints(type(stack))
            else stack
        )

    return swap(m, StackSpec, narrowed)


def query_key_norm(m: Any) -> Any:
    """Henry et al. 2020, in today's form: RMS norms with a gain on the queries and keys of every head.

    Scores of normed vectors need the 1 / sqrt(d_head) that T5 folds into the first draw of its queries.
    """
    _check_attention(m)

    def normed(attention: Any) -> Any:
        scale = "sqrt" if attention.scale == "none" else attention.scale
        return replace(attention, query_key_norm=RMSNorm(), scale=scale)

    return swap(swap(m, SelfAttention, normed), CrossAttention, normed)


VARIANTS = {
    "grouped_query": Variant(
        grouped_query, "attention", "four heads of a decoder share a key and a value", "Ainslie et al. 2023"
    ),
    "multi_query": Variant(multi_query, "attention", "all heads share one key and one value", "Shazeer 2019"),
    "parallel": Variant(
        parallel,
        "wiring",
        "attention and feed-forward side by side",
        "Wang and Komatsuzaki 2021",
    ),
    "query_key_norm": Variant(query_key_norm, "attention", "queries and keys are normed", "Henry et al. 2020"),
    "sliding_window": Variant(
        sliding_window, "attention", "a token sees 255 tokens on either side", "Beltagy et al. 2020"
    ),
}
