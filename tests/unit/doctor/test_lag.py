import random

import numpy as np
import pytest

from regard.doctor.lag import Features, Span, candidates, cheapest, correlation, pair_costs, spans
from regard.doctor.sentences import sentences


@pytest.fixture(scope="module")
def text() -> tuple[list[str], list[str]]:
    source, target, _ = zip(*sentences(1200, 3), strict=True)
    return list(source), list(target)


def test_aligned_text_is_one_span_without_a_lag(text: tuple[list[str], list[str]]) -> None:
    assert spans(*text) == [Span(0, 1200, 0)]


@pytest.mark.parametrize("count", [1, 3, 40])
def test_lost_target_lines_are_located(text: tuple[list[str], list[str]], count: int) -> None:
    source, target = text
    found = spans(source, target[:500] + target[500 + count :])
    assert [span.lag for span in found] == [0, -count]
    assert abs(found[1].first - 500) <= 40 + count


def test_lost_source_lines_give_a_positive_lag(text: tuple[list[str], list[str]]) -> None:
    source, target = text
    assert [span.lag for span in spans(source[:300] + source[305:], target)] == [0, 5]


def test_a_shifted_section_ends_where_the_lines_agree_again(text: tuple[list[str], list[str]]) -> None:
    source, target = text
    found = spans(source, target[:400] + target[402:800] + ["x", "y"] + target[800:])
    assert [span.lag for span in found] == [0, -2, 0]
    assert abs(found[1].first - 400) <= 20
    assert abs(found[2].first - 800) <= 20


def test_lines_sorted_by_length_are_not_taken_for_shifted(text: tuple[list[str], list[str]]) -> None:
    source, target = zip(*sorted(zip(*text, strict=True), key=lambda pair: len(pair[0])), strict=True)
    assert spans(source, target) == [Span(0, 1200, 0)]


def test_unrelated_lines_are_not_taken_for_shifted(text: tuple[list[str], list[str]]) -> None:
    source, target = text
    for seed in range(10):
        other = random.Random(seed).sample(target, 400)
        assert spans(source[:400], other) == [Span(0, 400, 0)]


def test_repeated_and_equal_lines_are_not_taken_for_shifted() -> None:
    assert spans(["Yes."] * 300, ["Ja."] * 300) == [Span(0, 300, 0)]


def test_short_texts_are_not_aligned() -> None:
    assert spans(["a"] * 5, ["b"] * 4) == [Span(0, 5, 0)]


def test_costs_prefer_equal_numbers() -> None:
    source = Features.of([f"number {i}" for i in range(30)])
    costs, chance = pair_costs(source, source, np.asarray([0, 1]))
    assert (costs[:29, 0] < costs[:29, 1]).all()
    assert costs[:, 0].mean() < chance


def test_a_change_of_the_lag_must_pay() -> None:
    costs = np.zeros((160, 2))
    costs[:80, 1] = 0.1
    costs[80:, 0] = 0.4  # 32 nats in all, less than a change costs
    assert (cheapest(costs) == 0).all()
    costs[80:, 0] = 1.0
    assert cheapest(costs).tolist() == [0] * 10 + [1] * 10


def test_distant_lags_are_found_by_the_correlation_of_lengths() -> None:
    rng = random.Random(1)
    lengths = np.asarray([rng.randint(1, 100) for _ in range(600)], float)
    assert -137 in candidates(lengths, lengths[137:])


def test_correlation_equals_that_of_numpy_and_is_zero_for_constants() -> None:
    one, other = np.asarray([1.0, 5.0, 9.0]), np.asarray([2.0, 4.0, 30.0])
    assert correlation(one, other) == pytest.approx(np.corrcoef(np.log(one + 5), np.log(other + 5))[0, 1])
    assert correlation(one, np.ones(3)) == 0.0
