"""Rank checkpoints by their validation metrics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

Metrics = dict[str, float]

ERROR = "standard_error"  # name of a metric: the standard error of the criterion on this validation set
# Two checkpoints are measured on the same sentences, so their difference varies less than either score: the paired
# standard error was 0.4 to 0.7 of the standard error of one score (docs/decisions/013-selection.md).
PAIRED = 0.5


@dataclass(frozen=True)
class Criterion:
    """The metric that ranks checkpoints: its name, and whether higher values are better."""

    name: str
    higher_is_better: bool


LOSS = Criterion("loss", False)


def order(scores: Mapping[int, Metrics], criterion: Criterion, reached: Metrics) -> list[int]:
    """Return the validated steps, best first. `reached` has the best values of criterion and loss so far.

    Steps whose score is within the noise of the best score are ranked by loss (similar to the rule of one standard
    error, Breiman et al. 1984). All other steps are ranked by score. Steps with equal scores are ranked by loss, and
    steps with equal losses by time. The loss is used because a metric of a few hundred decoded sentences is noisy, and
    is equal for all steps as long as no output is right.
    """
    bound = cost(reached, criterion) + PAIRED * reached.get(ERROR, 0.0)

    def key(step: int) -> tuple[float, float, float, int]:
        score, loss = cost(scores[step], criterion), cost(scores[step], LOSS)
        return (-math.inf if score <= bound else score), loss, score, step

    return sorted(scores, key=key)


def cost(metrics: Metrics, criterion: Criterion) -> float:
    """Return the value of a metric as a cost to minimise, or infinity if the metric is missing or NaN."""
    value = metrics.get(criterion.name, math.nan)
    return math.inf if math.isnan(value) else -value if criterion.higher_is_better else value
