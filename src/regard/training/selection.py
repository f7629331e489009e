"""Select checkpoints by their validation scores: which are best, and whether training still improves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

Metrics = dict[str, float]

ERROR = "standard_error"  # in the metrics: the standard error of the criterion on this validation set
# Two checkpoints are measured on the same sentences, so their difference varies less than either score: the paired
# standard error was 0.4 to 0.7 of the standard error of one score (docs/decisions/013-selection.md).
PAIRED = 0.5


@dataclass(frozen=True)
class Criterion:
    """The metric that ranks checkpoints, by its name, and its direction."""

    name: str
    higher_is_better: bool


LOSS = Criterion("loss", False)


def order(scores: Mapping[int, Metrics], criterion: Criterion, reached: Metrics) -> list[int]:
    """Return the validated steps, best first; `reached` holds the best values so far (`improvements`).

    A decoded metric of a few hundred sentences is noisy, and it ties while nothing is right yet; the loss is neither.
    So the steps whose score is within the noise of the highest are ranked by their loss (the rule of one standard
    error, Breiman et al. 1984), and the others by their score. Ties go to the lower loss, then to the earlier step.
    """
    bound = _cost(reached, criterion) + PAIRED * reached.get(ERROR, 0.0)

    def key(step: int) -> tuple[float, float, float, int]:
        cost, loss = _cost(scores[step], criterion), _cost(scores[step], LOSS)
        return (-math.inf if cost <= bound else cost), loss, cost, step

    return sorted(scores, key=key)


def improvements(reached: Metrics, metrics: Metrics, criterion: Criterion) -> Metrics:
    """Return those of criterion and loss that are better than `reached`, with the standard error of the criterion.

    Either is progress: a model whose loss falls still learns, even if none of its outputs is right yet.
    """
    better = [each.name for each in (criterion, LOSS) if _cost(metrics, each) < _cost(reached, each)]
    if criterion.name in better and ERROR in metrics:
        better.append(ERROR)
    return {name: metrics[name] for name in better}


def _cost(metrics: Metrics, criterion: Criterion) -> float:
    """Return a metric as something to minimise; infinite if it is missing or not a number."""
    value = metrics.get(criterion.name, math.nan)
    return math.inf if math.isnan(value) else -value if criterion.higher_is_better else value
