"""Intervals of a mean over seeds, for groups of lines: sacreBLEU's scores, resampled."""

import math
import random

import pytest
from sacrebleu.metrics.bleu import BLEU

from regard.errors import DataError, SpecError
from regard.evaluation.metrics import bleu, chrf, exact_match
from regard.evaluation.significance import intervals

WORDS = ["ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"]


def lines(count: int, wrong: float, seed: int) -> tuple[list[str], list[str]]:
    """References, and outputs in which some words are others."""
    rng, other = random.Random(0), random.Random(seed)
    wanted = [rng.choices(WORDS, k=rng.randint(4, 9)) for _ in range(count)]
    said = [[other.choice(WORDS) if other.random() < wrong else word for word in line] for line in wanted]
    return [" ".join(line) for line in wanted], [" ".join(line) for line in said]


def test_one_output_is_resampled_as_sacrebleu_does() -> None:
    wanted, said = lines(60, 0.3, 1)
    (found,) = intervals([said], wanted, [range(60)], tokenize="none")
    assert found.value == pytest.approx(bleu(said, wanted, "none").value)
    theirs = BLEU(tokenize="none").corpus_score(said, [wanted], n_bootstrap=1000)
    assert (found.high - found.low) / 2 == pytest.approx(theirs._ci, abs=0.05)


def test_a_group_is_scored_alone_and_seeds_are_averaged() -> None:
    wanted, one = lines(40, 0.2, 1)
    _, two = lines(40, 0.5, 2)
    short, rest, none = intervals([one, two], wanted, [range(10), range(10, 40), ()], tokenize="none", resamples=200)
    apart = [bleu(said[:10], wanted[:10], "none").value for said in (one, two)]
    assert short.value == pytest.approx(sum(apart) / 2)
    assert (short.lines, rest.lines, none.lines) == (10, 30, 0)
    assert short.low < short.value < short.high
    assert math.isnan(none.value)
    # Seeds that differ make the interval of both wider than lines alone would.
    (alone,) = intervals([one], wanted, [range(40)], tokenize="none", resamples=200)
    (both,) = intervals([one, two], wanted, [range(40)], tokenize="none", resamples=200)
    assert both.high - both.low > alone.high - alone.low


def test_other_metrics() -> None:
    wanted, said = lines(30, 0.1, 3)
    (right,) = intervals([said], wanted, [range(30)], "exact_match", resamples=200)
    assert right.value == pytest.approx(exact_match(said, wanted).value)
    assert 0 <= right.low <= right.value <= right.high <= 100
    (letters,) = intervals([said], wanted, [range(30)], "chrf", resamples=200)
    assert letters.value == pytest.approx(chrf(said, wanted).value)


def test_invalid_intervals_are_refused() -> None:
    with pytest.raises(SpecError, match="unknown metric 'bleau'"):
        intervals([["a"]], ["a"], [[0]], "bleau")
    with pytest.raises(DataError, match="at least one output"):
        intervals([], ["a"], [[0]])
