"""Schedules against their formulas at points computed by hand."""

import math
from typing import Any

import pytest

from regard.errors import SpecError
from regard.training.schedule import Constant, Cosine, InverseSqrt, LinearDecay, Schedule, WarmupStableDecay

ALL = [Constant, InverseSqrt, LinearDecay, Cosine, WarmupStableDecay]


def factors(schedule: Schedule, steps: int, *at: int) -> list[float]:
    return [schedule.factor(step, steps) for step in at]


def test_constant() -> None:
    assert factors(Constant(4), 100, 1, 2, 3, 4, 5, 100) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(Constant(), 100, 1, 50, 100) == factors(Constant(0), 100, 1, 50, 100) == [1, 1, 1]


def test_inverse_sqrt() -> None:
    # Vaswani et al.: proportional to min(step^-0.5, step * warmup^-1.5); 1 at the end of the warm-up.
    actual = factors(InverseSqrt(100), 10_000, 1, 50, 100, 400, 10_000)
    assert actual == pytest.approx([0.01, 0.5, 1.0, 0.5, 0.1], rel=1e-12)
    for step in (1, 7, 99, 100, 101, 5000):
        paper = min(step**-0.5, step * 100**-1.5) / 100**-0.5
        assert InverseSqrt(100).factor(step, 10_000) == pytest.approx(paper, rel=1e-12)
    assert factors(InverseSqrt(), 100, 1, 4, 100) == factors(InverseSqrt(0), 100, 1, 4, 100)
    assert factors(InverseSqrt(), 100, 1, 4, 100) == pytest.approx([1.0, 0.5, 0.1])


def test_linear() -> None:
    # Ten steps up, then ninety down: a ninetieth less at each, so that the last still learns.
    actual = factors(LinearDecay(10), 100, 1, 5, 10, 11, 12, 56, 100)
    assert actual == pytest.approx([0.1, 0.5, 1, 1, 89 / 90, 0.5, 1 / 90], rel=1e-12)
    assert factors(LinearDecay(10, floor=0.2), 100, 11, 56, 100) == pytest.approx([1, 0.6, 0.2 + 0.8 / 90])
    assert factors(LinearDecay(), 4, 1, 2, 3, 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert factors(LinearDecay(0), 4, 1, 4) == pytest.approx([1, 0.25])
    assert LinearDecay(10).factor(101, 100) == pytest.approx(0)


def test_cosine() -> None:
    actual = factors(Cosine(10), 100, 5, 10, 11, 41, 56, 71, 100)
    halfway = [math.cos(math.pi * done) / 2 + 0.5 for done in (30 / 90, 0.5, 60 / 90, 89 / 90)]
    assert actual == pytest.approx([0.5, 1, 1, *halfway], rel=1e-12)
    assert actual[3:6] == pytest.approx([0.75, 0.5, 0.25])
    floored = factors(Cosine(10, floor=0.1), 100, 11, 41, 56, 71)
    assert floored == pytest.approx([1, 0.1 + 0.9 * 0.75, 0.55, 0.1 + 0.9 * 0.25])
    assert Cosine(floor=0.1).factor(1001, 1000) == pytest.approx(0.1)


def test_warmup_stable_decay() -> None:
    # Up until 10, level until 80, then a twentieth less at each step.
    actual = factors(WarmupStableDecay(10), 100, 5, 10, 11, 50, 80, 81, 82, 91, 100)
    assert actual == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.95, 0.5, 0.05], rel=1e-12)
    assert WarmupStableDecay(10, decay=0.5, floor=0.5).factor(76, 100) == pytest.approx(0.75)
    assert factors(WarmupStableDecay(decay=0.0), 10, 1, 10) == [1, 1]
    assert factors(WarmupStableDecay(decay=1.0), 4, 1, 2, 3, 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    # A warm-up that reaches into the decay delays it.
    assert factors(WarmupStableDecay(90), 100, 45, 90, 91, 96) == pytest.approx([0.5, 1, 1, 0.5])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("warmup", [None, 0, 1, 7, 40, 100])
def test_learning_rates_are_positive_and_at_most_the_peak(kind: Any, warmup: int | None) -> None:
    values = [kind(warmup).factor(step, 40) for step in range(1, 41)]
    assert all(0 < factor <= 1 for factor in values)
    top = min(warmup or 1, 40)
    assert values[top - 1] == pytest.approx(min(1.0, 40 / warmup) if warmup else 1.0)
    rising, falling = values[:top], values[top - 1 :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("kind", ALL)
def test_training_of_one_step_has_a_positive_learning_rate(kind: Any) -> None:
    assert kind().factor(1, 1) == kind(1).factor(1, 1) == 1.0


@pytest.mark.parametrize("kind", ALL)
def test_settings_out_of_range_are_refused(kind: Any) -> None:
    with pytest.raises(SpecError, match="warmup: must be at least 0, not -1"):
        kind(-1)
    for name in {"floor", "decay"} & set(kind.__slots__):
        for share in (-0.1, 1.1):
            with pytest.raises(SpecError, match=rf"{name}: must lie in \[0, 1\]"):
                kind(**{name: share})
