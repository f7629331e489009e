"""Early stopping: improvements, and when training stops without an improvement."""

import math

import pytest

from regard.training.early_stopping import improvements, should_stop
from regard.training.ranking import ERROR, Criterion, Metrics

BLEU = Criterion("bleu", True)


def metrics(bleu: float, loss: float) -> Metrics:
    return {"bleu": float(bleu), "loss": float(loss), ERROR: 0.0}


@pytest.mark.parametrize(
    ("reached", "current", "better"),
    [
        ({}, metrics(0, 5), {"bleu", "loss", ERROR}),
        (metrics(0, 5), metrics(0, 4), {"loss"}),
        (metrics(0, 5), metrics(1, 6), {"bleu", ERROR}),
        (metrics(3, 5), metrics(3, 5), set()),
        (metrics(3, 5), metrics(math.nan, math.nan), set()),
        (metrics(3, 5), metrics(2, 6), set()),
    ],
)
def test_progress_is_a_better_score_or_a_lower_loss(reached: Metrics, current: Metrics, better: set[str]) -> None:
    assert set(improvements(reached, current, BLEU)) == better


@pytest.mark.parametrize(
    ("validations", "patience", "stops"),
    [(0, 3, False), (2, 3, False), (3, 3, True), (4, 3, True), (0, 0, False), (9, 0, False), (9, None, False)],
)
def test_training_stops_after_patience_validations_without_improvement(
    validations: int, patience: int | None, stops: bool
) -> None:
    assert should_stop(validations, patience) is stops
