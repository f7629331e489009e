"""Time budgets: the number of steps, the share of validation, and several sessions."""

import pytest

from regard.training import budget
from regard.training.budget import SHARE, Budget


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(budget.time, "monotonic", fake.monotonic)
    return fake


def test_without_a_budget_the_planned_steps_are_kept(clock: Clock) -> None:
    free = Budget(None)
    clock.now += 1e6
    assert free.steps(5, 100) == 100
    assert not free.due()


def test_steps_fill_the_time_that_is_left(clock: Clock) -> None:
    limited = Budget(100.0)
    assert limited.steps(0, 77) == 77  # nothing is known yet
    clock.now += 20
    limited.add(10, 20.0)
    assert limited.steps(10, 77) == 10 + 40


def test_time_before_training_counts(clock: Clock) -> None:
    limited = Budget(100.0, began=clock.now - 60)
    limited.add(1, 1.0)
    assert limited.steps(1, 77) == 1 + 40


def test_earlier_sessions_count(clock: Clock) -> None:
    limited = Budget(100.0)
    limited.earlier = 90.0
    limited.add(1, 1.0)
    assert limited.steps(50, 77) == 60
    clock.now += 11
    assert limited.steps(55, 77) == 55
    assert limited.elapsed == pytest.approx(101.0)


def test_time_for_final_validation_and_saving_is_reserved(clock: Clock) -> None:
    """The last weights are validated and saved after the last step."""
    limited = Budget(100.0)
    limited.note_validation(5.0)
    limited.saving = 1.0
    limited.add(1, 1.0)
    assert limited.ending == 12.0
    # 88 seconds are left, a tenth of which goes into validations.
    assert limited.steps(0, 7) == pytest.approx(88 * (1 - SHARE), abs=4)
    clock.now += 89
    assert limited.steps(30, 77) == 30


def test_estimate_uses_recent_steps(clock: Clock) -> None:
    limited = Budget(1000.0)
    for _ in range(200):
        limited.add(1, 10.0)
    for _ in range(budget.RECENT):
        limited.add(1, 1.0)
    assert limited.steps(0, 7) == 1000
    limited.forget()
    assert limited.steps(0, 7) == 7
    assert clock.now == 1000.0


@pytest.mark.parametrize(("seconds", "spacing"), [(0.1, 4.0), (1.0, 9.0), (5.0, 45.0)])
def test_validation_takes_a_tenth_of_the_time(clock: Clock, seconds: float, spacing: float) -> None:
    limited = Budget(100.0)
    limited.note_validation(seconds)
    assert limited.spacing == pytest.approx(spacing)
    clock.now += spacing - 0.01
    assert not limited.due()
    clock.now += 0.02
    assert limited.due() == (limited.left > spacing / 2)


def test_first_validation_comes_after_a_tenth(clock: Clock) -> None:
    limited = Budget(100.0)
    clock.now += 9.9
    assert not limited.due()
    clock.now += 0.2
    assert limited.due()


def test_no_validation_is_due_shortly_before_the_last(clock: Clock) -> None:
    limited = Budget(100.0)
    limited.note_validation(1.0)
    clock.now += 96
    assert not limited.due()
