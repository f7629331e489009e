"""The ranking of checkpoints."""

import math
from typing import Any

import pytest

from regard.training.early_stopping import improvements
from regard.training.ranking import ERROR, LOSS, Criterion, Metrics, order

BLEU = Criterion("bleu", True)


def ranked(metrics: list[Metrics], criterion: Criterion = BLEU) -> list[int]:
    """The order after validating steps 1, 2, ... with these metrics."""
    reached: Metrics = {}
    for each in metrics:
        reached |= improvements(reached, each, criterion)
    return order(dict(enumerate(metrics, start=1)), criterion, reached)


def metrics(bleu: float, loss: float, error: float = 0.0) -> Metrics:
    return {"bleu": float(bleu), "loss": float(loss), ERROR: error}


def test_without_noise_the_criterion_decides_and_the_loss_breaks_ties() -> None:
    assert ranked([metrics(10, 3), metrics(12, 4), metrics(12, 3.5), metrics(11, 1)]) == [3, 2, 4, 1]
    assert ranked([{"loss": 3.0}, {"loss": 1.0}, {"loss": 2.0}, {"loss": 1.0}], LOSS) == [2, 4, 3, 1]


def test_with_a_score_of_0_the_loss_decides() -> None:
    assert ranked([metrics(0, 5), metrics(0, 4), metrics(0, 3), metrics(0, 3.5)]) == [3, 4, 2, 1]


def test_within_the_noise_of_the_highest_score_the_loss_decides() -> None:
    scores = [metrics(30.0, 2.0, 2.0), metrics(29.5, 1.0, 2.0), metrics(28.0, 0.5, 2.0)]  # half of 2.0 counts
    assert ranked(scores) == [2, 1, 3]
    assert ranked([each | {ERROR: 0.5} for each in scores]) == [1, 2, 3]
    assert ranked([each | {ERROR: 8.0} for each in scores]) == [3, 2, 1]


def test_falling_loss_cannot_select_a_score_below_the_noise() -> None:
    """Scores of steps whose weights are deleted still count, because the best values are stored."""
    reached: Metrics = {}
    scores: dict[int, Metrics] = {}
    best = 0
    for step, bleu in enumerate([30.0, 29.4, 28.8, 28.2, 27.6], start=1):
        scores[step] = metrics(bleu, 5.0 - step, 2.0)
        reached |= improvements(reached, scores[step], BLEU)
        best = order(scores, BLEU, reached)[0]
        scores = {kept: scores[kept] for kept in {best, step}}
    assert best == 2  # 29.4 is within 1.0 of 30, all later ones are not


@pytest.mark.parametrize("bad", [{"bleu": math.nan}, {"loss": math.nan}, {}])
def test_nan_is_the_worst_score(bad: dict[str, Any]) -> None:
    assert ranked([bad, metrics(1, 9)]) == [2, 1]
    assert ranked([metrics(1, 9), bad]) == [1, 2]
