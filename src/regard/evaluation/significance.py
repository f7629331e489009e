"""The paired bootstrap test of the difference between two systems (Koehn, 2004), and confidence intervals of scores."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from regard.errors import DataError, SpecError
from regard.evaluation.metric import Metric, reference_lists
from regard.evaluation.metrics import metric as by_name

# sacreBLEU's defaults: with them, this package and sacreBLEU resample the same lines.
RESAMPLES = 1000
SEED = 12345

CHUNK = 4_000_000  # resampled lines in memory at once: 32 MB
Statistics = Float[np.ndarray, "N K"]
ScoreOf = Callable[[Any], float]  # the score for the sums of K statistics


@dataclass(frozen=True, slots=True)
class Comparison:
    """The scores of two outputs for the same lines, and the result of a paired bootstrap test.

    `difference` is `second` - `first`. `low` and `high` are the ends of the 95 % interval of the difference. The winner
    is the output with the better score on all lines. `p_value` is (c + 1) / (resamples + 1) (Koehn, 2004), where c is
    the number of resamples in which the winner does not score better. The test is one-sided, so the interval excludes 0
    when `p_value` is below 0.025.
    """

    metric: str
    signature: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    lines: int
    resamples: int
    seed: int


def paired_bootstrap(
    first: Sequence[Any],
    second: Sequence[Any],
    references: Sequence[Any],
    metric: str | Metric = "bleu",
    resamples: int = RESAMPLES,
    seed: int = SEED,
    **settings: Any,
) -> Comparison:
    """Compare two outputs for the same lines by the paired bootstrap.

    `metric` is a metric, or the name of a metric. In the second case, the metric is created with `settings`. The score
    of a resample is the exact corpus score, computed from the summed statistics of the resampled lines.
    """
    metric = as_metric(metric, settings)
    statistics = metric.statistics(first, references), metric.statistics(second, references)
    signature = metric.signature(reference_lists(references), bs=resamples, seed=seed)
    return _compare(*statistics, metric.value, metric.full_title, signature, resamples, seed)


def verdict(comparison: Comparison, metric: Metric, first: str, second: str) -> str:
    """Return a sentence that states which of two systems, named `first` and `second`, is better.

    A difference counts as beyond chance if its 95 % interval excludes 0.
    """

    def number(value: float) -> str:
        return f"{value:.{metric.digits}f}"

    scores = f"{metric.title} {metric.text(comparison.second)} against {metric.text(comparison.first)}"
    interval = f"95 % interval {number(comparison.low)} to {number(comparison.high)}"
    p_value = f"{comparison.p_value:.3f}" if comparison.p_value >= 0.0095 else f"{comparison.p_value:.1g}"
    difference = f"difference {number(comparison.difference)} ({interval}, p = {p_value})"
    if comparison.low <= 0 <= comparison.high:
        return f"No difference beyond chance between {second} and {first}: {scores}, {difference}."
    better = (comparison.difference > 0) == metric.higher_is_better
    return f"{second} is {'better' if better else 'worse'} than {first}: {scores}, {difference}."


def as_metric(metric: str | Metric, settings: Mapping[str, Any]) -> Metric:
    """Return `metric` if it is a `Metric`. If it is a name, return the metric of that name with `settings`."""
    return by_name(metric, **settings) if isinstance(metric, str) else metric


@dataclass(frozen=True, slots=True)
class Interval:
    """A score and its 95 % interval."""

    value: float
    low: float
    high: float
    lines: int


def intervals(
    outputs: Sequence[Sequence[str]],
    references: Sequence[Any],
    groups: Sequence[Sequence[int]],
    metric: str | Metric = "bleu",
    resamples: int = RESAMPLES,
    seed: int = SEED,
    **settings: Any,
) -> list[Interval]:
    """Return, for each group of lines, the mean score of several outputs and the 95 % interval of the mean.

    `outputs` are outputs for the same lines, for example from models trained with different seeds. Every resample draws
    lines and outputs with replacement, with the same lines for all outputs. The interval therefore includes the
    variation between lines and between outputs. A group is a list of line indices; the score of an empty group is nan.
    `metric` and `settings` are as in `paired_bootstrap`.
    """
    metric = as_metric(metric, settings)
    if not outputs:
        raise DataError(f"{metric.name}: an interval needs at least one output")
    statistics = [metric.statistics(output, references) for output in outputs]
    return [_interval([each[list(group)] for each in statistics], metric.value, resamples, seed) for group in groups]


def _interval(counts: Sequence[Statistics], score: ScoreOf, resamples: int, seed: int) -> Interval:
    lines, many = len(counts[0]), len(counts)
    if not lines:
        return Interval(math.nan, math.nan, math.nan, 0)
    value = float(np.mean([score(each.sum(0)) for each in counts]))
    chosen = np.random.default_rng(seed + 1).integers(many, size=(resamples, many))
    drawn: list[float] = []
    for times in _draws(lines, resamples, seed):
        totals = [times @ each for each in counts]
        for row in range(len(times)):
            drawn.append(float(np.mean([score(totals[which][row]) for which in chosen[len(drawn)]])))
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    return Interval(value, low, high, lines)


def standard_error(
    outputs: Sequence[Any],
    references: Sequence[Any],
    metric: str | Metric,
    resamples: int = 200,
    seed: int = SEED,
    **settings: Any,
) -> float:
    """Return the standard error of a corpus score.

    The standard error of a proportion comes from the binomial distribution. For other metrics it comes from the
    bootstrap over lines. With a single line it cannot be estimated, and 100 is returned.
    """
    metric = as_metric(metric, settings)
    statistics = metric.statistics(outputs, references)
    if metric.proportion:
        return proportion_error(int(statistics[:, 0].sum()), len(statistics))
    if len(statistics) < 2:
        return 100.0
    totals = np.concatenate([times @ statistics for times in _draws(len(statistics), resamples, seed)])
    return float(np.std([metric.value(total) for total in totals], ddof=1))


def proportion_error(right: int, lines: int) -> float:
    """Return the standard error, in percent, of the proportion `right` / `lines`.

    The proportion is estimated as (right + 1) / (lines + 2), so the standard error is always above 0.
    """
    share = (right + 1) / (lines + 2)
    return 100 * math.sqrt(share * (1 - share) / lines)


def compare_lines(
    first: Sequence[float | int], second: Sequence[float | int], name: str, resamples: int = RESAMPLES, seed: int = SEED
) -> Comparison:
    """Compare two outputs by the paired bootstrap, given one score per line, such as an F-score.

    The corpus score is 100 times the mean of the scores. To compare two classifiers, pass
    `[p == y for p, y in zip(predictions, labels)]` as the scores of each classifier, and the name "accuracy".
    """
    if len(first) != len(second):
        raise DataError(f"{name}: {len(first)} lines in the first output and {len(second)} in the second")
    scores = [np.asarray(side, dtype=np.float64).reshape(-1, 1) for side in (first, second)]
    for which, side in zip(("first", "second"), scores, strict=True):
        if not np.isfinite(side).all():
            line = int(np.flatnonzero(~np.isfinite(side))[0]) + 1
            raise DataError(
                f"{name}: line {line} of the {which} output has the score {side[line - 1, 0]}; scores must be finite"
            )
    lines = len(first)
    return _compare(scores[0], scores[1], lambda total: 100 * float(total[0]) / lines, name, "", resamples, seed)


def _compare(
    first: Statistics, second: Statistics, score: ScoreOf, name: str, signature: str, resamples: int, seed: int
) -> Comparison:
    lines = len(first)
    if lines < 2:
        raise DataError(f"{name}: {lines} lines cannot be resampled; a comparison needs at least 2, better hundreds")
    if resamples < 100:
        raise SpecError("resamples", f"must be at least 100 for an interval of 95 %, not {resamples}")
    if seed < 0:
        raise SpecError("seed", f"must be 0 or more, not {seed}")
    whole = score(first.sum(0)), score(second.sum(0))
    difference = whole[1] - whole[0]
    # Each output has its own matrix product, so that equal statistics give bit-equal sums.
    drawn = np.array(
        [
            score(b) - score(a)
            for times in _draws(lines, resamples, seed)
            for a, b in zip(times @ first, times @ second, strict=True)
        ]
    )
    tie = 1e-12 * max(1.0, *map(abs, whole))  # equal scores can differ by rounding
    ahead = np.sign(difference) if abs(difference) > tie else 0.0
    not_better = int((drawn * ahead <= tie).sum())
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    p_value = (not_better + 1) / (resamples + 1)
    return Comparison(name, signature, *whole, difference, low, high, p_value, lines, resamples, seed)


def _draws(lines: int, resamples: int, seed: int) -> Iterator[Float[np.ndarray, "R N"]]:
    """Yield resamples in chunks, one row per resample: how often each line occurs in `lines` draws with replacement."""
    rng = np.random.default_rng(seed)
    chunk = max(1, CHUNK // lines)
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        drawn = rng.choice(lines, size=(rows, lines), replace=True)
        drawn += lines * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * lines).reshape(rows, lines).astype(np.float64)
