"""Rank checkpoints by their validation scores."""

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
    """The name of the metric that ranks checkpoints, and its direction."""

    name: str
    higher_is_better: bool


LOSS = Criterion("loss", False)


def order(scores: Mapping[int, Metrics], criterion: Criterion, reached: Metrics) -> list[int]:
    """Return the validated steps, best first; `reached` has the best values so far (see `early_stopping.improvements`).

    A metric of a few hundred decoded sentences is noisy, and all steps tie while no output is right. The loss has
    neither problem. So steps whose score is within the noise of the best score are ranked by their loss (the rule of
    one standard error, Breiman et al. 1984), and all other steps by their score. Of two steps with equal scores, the
    one with the lower loss comes first, then the earlier one.
    """
    bound = cost(reached, criterion) + PAIRED * reached.get(ERROR, 0.0)

    def key(step: int) -> tuple[float, float, float, int]:
        score, loss = cost(scores[step], criterion), cost(scores[step], LOSS)
        return (-math.inf if score <= bound else score), loss, score, step

    return sorted(scores, key=key)


def cost(metrics: Metrics, criterion: Criterion) -> float:
    """Return the value of a metric as a cost to minimise; infinite if it is missing or NaN."""
    value = metrics.get(criterion.name, math.nan)
    return math.inf if math.isnan(value) else -value if criterion.higher_is_better else value
