"""Properties of every comparison of two outputs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.evaluation.significance import compare_lines, paired_bootstrap

pairs = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=40)
words = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=8).map(" ".join)
corpora = st.lists(st.tuples(words, words, words), min_size=2, max_size=8)


@settings(max_examples=60)
@given(pairs, st.integers(0, 100))
def test_swapping_systems_only_changes_the_sign(lines: list[tuple[float, float]], seed: int) -> None:
    first, second = map(list, zip(*lines, strict=True))
    forward = compare_lines(first, second, "score", resamples=100, seed=seed)
    swapped = compare_lines(second, first, "score", resamples=100, seed=seed)
    assert (forward.first, forward.second, forward.difference) == (swapped.second, swapped.first, -swapped.difference)
    assert (forward.low, forward.high) == pytest.approx((-swapped.high, -swapped.low), abs=1e-9)
    assert forward.p_value == swapped.p_value


@settings(max_examples=40)
@given(corpora, st.sampled_from(["bleu", "chrf", "ter", "exact_match"]))
def test_swapping_systems_only_changes_the_sign_of_corpus_scores(
    corpus: list[tuple[str, str, str]], metric: str
) -> None:
    first, second, references = map(list, zip(*corpus, strict=True))
    forward = paired_bootstrap(first, second, references, metric, resamples=100)
    swapped = paired_bootstrap(second, first, references, metric, resamples=100)
    assert (forward.first, forward.second, forward.difference) == (swapped.second, swapped.first, -swapped.difference)
    assert (forward.low, forward.high) == pytest.approx((-swapped.high, -swapped.low), abs=1e-9)
    assert forward.p_value == swapped.p_value
    assert 0 < forward.p_value <= 1
    assert forward.low <= forward.high


@settings(max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(0.01, 1))
def test_constant_gain_is_significant(first: list[float], gain: float) -> None:
    comparison = compare_lines(first, [score + gain for score in first], "score", resamples=100)
    assert (comparison.difference, comparison.low, comparison.high) == pytest.approx((100 * gain,) * 3)
    assert comparison.p_value == 1 / 101


@settings(max_examples=60)
@given(pairs)
def test_p_below_one_fortieth_agrees_with_an_interval_without_0(lines: list[tuple[float, float]]) -> None:
    first, second = map(list, zip(*lines, strict=True))
    comparison = compare_lines(first, second, "score", resamples=400)
    nearer_end = comparison.low if comparison.difference > 0 else -comparison.high
    if comparison.p_value < 0.02:
        assert nearer_end > 0
    elif comparison.p_value > 0.03:
        assert nearer_end <= 1e-9


def test_interval_contains_the_true_difference_in_95_percent_of_cases() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        first, second = rng.random(60) < 0.5, rng.random(60) < 0.6
        comparison = compare_lines(first.tolist(), second.tolist(), "accuracy", resamples=200)
        hits += comparison.low <= 10 <= comparison.high
        assert comparison.low <= comparison.difference <= comparison.high
    assert 0.91 <= hits / 300 <= 0.98


def test_p_is_below_5_percent_in_10_percent_of_the_cases_without_a_difference() -> None:
    """The documented meaning of p: the test is one-sided, on the side of the better output."""
    rng = np.random.default_rng(1)
    low = sum(
        compare_lines(rng.random(80).tolist(), rng.random(80).tolist(), "score", resamples=200).p_value < 0.05
        for _ in range(400)
    )
    assert 0.06 <= low / 400 <= 0.14
