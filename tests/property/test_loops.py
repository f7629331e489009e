"""Loops in outputs: every loop is detected, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from regard.decoding.loops import AT_END, COPIES, PERIOD, TOKENS, find_loop

ANY = st.lists(st.integers(0, 3), max_size=30)


def loops(ids: list[int]) -> list[int]:
    """The lengths of all loops, by definition."""
    lengths = []
    for start in range(len(ids)):
        for end in range(start + 1, len(ids) + 1):
            tokens, part = end - start, ids[start:end]
            half, last = tokens >= TOKENS and 2 * tokens >= len(ids), tokens >= AT_END and end == len(ids)
            periods = [p for p in range(1, PERIOD + 1) if tokens >= COPIES * p and part[p:] == part[:-p]]
            if periods and (half or last):
                lengths.append(tokens)
    return lengths


@given(ANY | st.tuples(ANY, ANY, st.integers(1, 6), ANY).map(lambda t: t[0] + t[1][:9] * t[2] + t[3][:4]))
def test_find_loop_returns_the_longest_loop(ids: list[int]) -> None:
    loop, expected = find_loop(ids), max(loops(ids), default=None)
    assert (None if loop is None else loop.tokens) == expected
    if loop is not None:
        part = ids[loop.start : loop.start + loop.tokens]
        assert part[loop.period :] == part[: -loop.period]


@given(
    st.lists(st.integers(10, 99), max_size=60),
    st.lists(st.integers(0, 9), min_size=1, max_size=PERIOD),
    st.integers(AT_END, 40),
)
def test_repeated_end_of_an_output_is_a_loop(before: list[int], part: list[int], copies: int) -> None:
    """Wherever the loop begins, and wherever the length limit cuts it."""
    cut = part[: len(part) // 2]
    loop = find_loop(before + part * copies + cut)
    assert loop is not None
    assert loop.tokens == len(part) * copies + len(cut)
    assert loop.start == len(before)
    assert len(part) % loop.period == 0 or loop.period < len(part)


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=100), st.integers(1, COPIES - 1))
def test_few_copies_are_not_a_loop(ids: list[int], copies: int) -> None:
    assert find_loop(ids * copies) is None


def test_short_outputs_are_not_loops() -> None:
    assert find_loop([]) is None
    assert find_loop([5]) is None
    assert find_loop([5] * (TOKENS - 1)) is None  # "no no no no no no no"
    assert find_loop([5] * TOKENS) is not None
    assert find_loop([5] * TOKENS + [*range(10, 10 + TOKENS + 1)]) is None  # less than half of it
