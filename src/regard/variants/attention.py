"""Shared keys and values, windows, query-key norms and parallel branches, which Narang et al. 2021 did not test."""

from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.nn.block import Block
from regard.nn.branches.parallel import Parallel
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.pattern import Window
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.base import StackSpec
from regard.tree import hints, swap, walk
from regard.variants.base import Variant, check_attention, swap_attention


def parallel(m: Any) -> Any:
    """Use parallel blocks, each with one residual branch: x + attention(norm(x)) + feed_forward(norm(x))."""

    def side_by_side(block: Block) -> Block:
        if len(block.branches) == 1:
            return block
        if len(set(block.rules())) > 1:
            problem = "branches with different residual rules cannot run in parallel"
            raise SpecError("residual", f"{problem}; use one rule for all")
        return Block((Parallel(block.branches),), block.rules()[0])

    return swap(m, Block, side_by_side)


def grouped_query(m: Any) -> Any:
    """Share keys and values in every group of four decoder heads (Ainslie et al. 2023).

    The encoder is unchanged, as in the paper. The number of groups is heads / 4, or the closest divisor of the number
    of heads.
    """
    if getattr(m, "decoder", None) is None:
        return m
    check_attention(m.decoder, "queries and keys to change")

    def grouped(attention: Any) -> Any:
        heads = attention.heads or m.heads
        divisors = [n for n in range(heads, 0, -1) if heads % n == 0]  # of two equally close ones, min takes the larger
        return _with_groups(attention, heads, min(divisors, key=lambda groups: abs(groups - heads / 4)))

    return replace(m, decoder=swap_attention(m.decoder, grouped))


def multi_query(m: Any) -> Any:
    """Share keys and values among all heads of every attention layer (Shazeer 2019)."""
    check_attention(m, "queries and keys to change")
    return swap_attention(m, lambda attention: _with_groups(attention, attention.heads or m.heads, 1))


def _with_groups(attention: Any, heads: int, groups: int) -> Any:
    return attention if (attention.kv_heads or heads) == groups else replace(attention, kv_heads=groups)


def sliding_window(m: Any) -> Any:
    """Limit self-attention to a window (Beltagy et al. 2020).

    A token attends to itself and to 255 tokens on either side, or in a decoder to 255 tokens on the left only.
    """

    def narrowed(stack: Any) -> Any:
        attends = any(isinstance(part, SelfAttention) for part in walk(stack))
        has_pattern = attends and "attention_pattern" in hints(type(stack))
        return replace(stack, attention_pattern=Window(256)) if has_pattern else stack

    return swap(m, StackSpec, narrowed)


def query_key_norm(m: Any) -> Any:
    """Apply an RMS norm with a gain to the queries and keys of every head, a later version of Henry et al. 2020.

    Scores of normalised vectors need the factor 1 / sqrt(d_head). T5 has this factor only in the initialisation of its
    query weights, so the scores are scaled here.
    """
    check_attention(m, "queries and keys to change")

    def normed(attention: Any) -> Any:
        scale = "sqrt" if attention.scale == "none" else attention.scale
        return replace(attention, query_key_norm=RMSNorm(), scale=scale)

    return swap_attention(m, normed)


VARIANTS = {
    "grouped_query": Variant(
        grouped_query, "attention", "four heads of a decoder share a key and a value", "Ainslie et al. 2023"
    ),
    "multi_query": Variant(multi_query, "attention", "all heads share one key and one value", "Shazeer 2019"),
    "parallel": Variant(parallel, "wiring", "attention and feed-forward in parallel", "Wang and Komatsuzaki 2021"),
    "query_key_norm": Variant(query_key_norm, "attention", "normalised queries and keys", "Henry et al. 2020"),
    "sliding_window": Variant(
        sliding_window, "attention", "attention to 255 tokens on either side", "Beltagy et al. 2020"
    ),
}
