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
    """Return (references, outputs): in the outputs, a share of the words is replaced."""
    rng, other = random.Random(0), random.Random(seed)
    references = [rng.choices(WORDS, k=rng.randint(4, 9)) for _ in range(count)]
    outputs = [[other.choice(WORDS) if other.random() < wrong else word for word in line] for line in references]
    return [" ".join(line) for line in references], [" ".join(line) for line in outputs]


def test_one_output_is_resampled_as_sacrebleu_does() -> None:
    references, output = lines(60, 0.3, 1)
    (interval,) = intervals([output], references, [range(60)], tokenize="none")
    assert interval.value == pytest.approx(bleu(output, references, "none").value)
    theirs = BLEU(tokenize="none").corpus_score(output, [references], n_bootstrap=1000)
    assert (interval.high - interval.low) / 2 == pytest.approx(theirs._ci, abs=0.05)


def test_a_group_is_scored_alone_and_seeds_are_averaged() -> None:
    references, first = lines(40, 0.2, 1)
    _, second = lines(40, 0.5, 2)
    short, rest, none = intervals(
        [first, second], references, [range(10), range(10, 40), ()], tokenize="none", resamples=200
    )
    apart = [bleu(output[:10], references[:10], "none").value for output in (first, second)]
    assert short.value == pytest.approx(sum(apart) / 2)
    assert (short.lines, rest.lines, none.lines) == (10, 30, 0)
    assert short.low < short.value < short.high
    assert math.isnan(none.value)
    # The difference between the seeds makes the interval wider than lines alone would.
    (alone,) = intervals([first], references, [range(40)], tokenize="none", resamples=200)
    (both,) = intervals([first, second], references, [range(40)], tokenize="none", resamples=200)
    assert both.high - both.low > alone.high - alone.low


def test_intervals_of_other_metrics() -> None:
    references, output = lines(30, 0.1, 3)
    (right,) = intervals([output], references, [range(30)], "exact_match", resamples=200)
    assert right.value == pytest.approx(exact_match(output, references).value)
    assert 0 <= right.low <= right.value <= right.high <= 100
    (letters,) = intervals([output], references, [range(30)], "chrf", resamples=200)
    assert letters.value == pytest.approx(chrf(output, references).value)


def test_invalid_intervals_are_refused() -> None:
    with pytest.raises(SpecError, match="unknown metric 'bleau'"):
        intervals([["a"]], ["a"], [[0]], "bleau")
    with pytest.raises(DataError, match="at least one output"):
        intervals([], ["a"], [[0]])
