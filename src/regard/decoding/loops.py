"""Find loops in an output: the same few tokens repeated, as undertrained models generate."""

from collections.abc import Sequence
from dataclasses import dataclass

PERIOD = 8  # most tokens of the repeated sequence
COPIES = 4  # at least
TOKENS, AT_END = 8, 12  # of all copies together, at least: where they are half of the output, or where it ends in them


@dataclass(frozen=True, slots=True)
class Loop:
    """`tokens` tokens from `start` on that have this period: each is the one `period` places before it."""

    start: int
    tokens: int
    period: int


def find_loop(ids: Sequence[int]) -> Loop | None:
    """Return the longest loop that makes an output degenerate, of the shortest period; None if there is none.

    A loop is a sequence of at most 8 tokens that stands at least 4 times in a row; the last copy may be cut. It counts
    if it has at least 8 tokens and half of the output, or at least 12 tokens and the output ends in it. Of 107,000
    training targets of six corpora, in subwords, none has one.
    """
    longest: Loop | None = None
    for period in range(1, PERIOD + 1):
        for start, end in _equal(ids, period):
            tokens = end - start
            counts = (tokens >= TOKENS and 2 * tokens >= len(ids)) or (tokens >= AT_END and end == len(ids))
            if counts and tokens >= COPIES * period and (longest is None or tokens > longest.tokens):
                longest = Loop(start, tokens, period)
    return longest


def _equal(ids: Sequence[int], period: int) -> list[tuple[int, int]]:
    """Return (start, end) of the longest stretches of this period."""
    stretches, start = [], 0
    for at in range(period, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[at - period]:
            if at - start > period:
                stretches.append((start, at))
            start = at - period + 1
    return stretches
