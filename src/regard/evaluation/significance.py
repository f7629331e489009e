"""Is one output better than another, or did it only meet easier lines? The paired bootstrap (Koehn, 2004)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from regard.errors import DataError, SpecError, nearest
from regard.evaluation.metrics import (
    CORPUS_METRICS,
    References,
    corpus_metric,
    line_matches,
    reference_streams,
)

# sacreBLEU's defaults, so that both draw the same lines.
RESAMPLES = 1000
SEED = 12345

CHUNK = 4_000_000  # drawn lines held at once: 32 MB


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two outputs for the same lines, and how far their difference would vary with other lines of the same kind.

    `difference` is second minus first; `low` and `high` hold 95 % of the resampled differences. `p_value` is Koehn's:
    the share of resamples in which the output that is better on the whole set is not better, (c + 1) / (resamples + 1).
    It is one-sided, so the interval leaves out 0 where it falls below 0.025.
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
    first: Sequence[str],
    second: Sequence[str],
    references: References,
    metric: str = "bleu",
    resamples: int = RESAMPLES,
    seed: int = SEED,
    **settings: Any,
) -> Comparison:
    """Compare two outputs by `bleu`, `chrf`, `ter` (with the settings of that metric) or `exact_match`.

    A corpus score is recomputed exactly for every resample, from sacreBLEU's own counts per line.
    """
    if metric == "exact_match":
        if settings:
            raise SpecError(next(iter(settings)), "exact_match has no settings")
        matches = line_matches(first, references), line_matches(second, references)
        return compare_lines(*matches, name="exact match", resamples=resamples, seed=seed)
    if metric not in CORPUS_METRICS:
        raise SpecError("metric", f"unknown metric {metric!r}; {nearest(metric, (*CORPUS_METRICS, 'exact_match'))}")
    scorer = corpus_metric(metric, **settings)
    counts = _counts(scorer, first, references), _counts(scorer, second, references)
    signature = scorer.get_signature()
    signature.update("bs", resamples)
    signature.update("seed", seed)

    def score(total: Float[np.ndarray, "K"]) -> float:
        return scorer._compute_score_from_stats(total.tolist()).score

    name = scorer._compute_score_from_stats(counts[0].sum(0).tolist()).name
    return _compare(*counts, score, name, signature.format(), resamples, seed)


@dataclass(frozen=True, slots=True)
class Interval:
    """A score, and where 95 % of the resampled ones lie."""

    value: float
    low: float
    high: float
    lines: int


def intervals(
    outputs: Sequence[Sequence[str]],
    references: References,
    groups: Sequence[Sequence[int]],
    metric: str = "bleu",
    resamples: int = RESAMPLES,
    seed: int = SEED,
    **settings: Any,
) -> list[Interval]:
    """The mean score of several `outputs` for the same lines (a model's seeds), over each of the `groups` of lines.

    Every resample draws lines, the same for all outputs, and outputs, each with replacement: the interval tells of
    both, as far as few outputs can. Metrics as in `paired_bootstrap`. An empty group has no score: not a number.
    """
    if not outputs:
        raise DataError(f"{metric}: an interval needs at least one output")
    if metric == "exact_match":
        counts = [np.asarray(line_matches(said, references), dtype=np.float64).reshape(-1, 1) for said in outputs]
        counts = [np.concatenate((matches, np.ones_like(matches)), 1) for matches in counts]
        score: Callable[[Any], float] = lambda total: 100 * float(total[0] / total[1])  # noqa: E731
    elif metric in CORPUS_METRICS:
        scorer = corpus_metric(metric, **settings)
        counts = [_counts(scorer, said, references) for said in outputs]
        score = lambda total: scorer._compute_score_from_stats(total.tolist()).score  # noqa: E731
    else:
        raise SpecError("metric", f"unknown metric {metric!r}; {nearest(metric, (*CORPUS_METRICS, 'exact_match'))}")
    return [_interval([one[list(group)] for one in counts], score, resamples, seed) for group in groups]


def _interval(
    counts: Sequence[Float[np.ndarray, "N K"]], score: Callable[[Any], float], resamples: int, seed: int
) -> Interval:
    lines, many = len(counts[0]), len(counts)
    if not lines:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    value = float(np.mean([score(one.sum(0)) for one in counts]))
    chosen = np.random.default_rng(seed + 1).integers(many, size=(resamples, many))
    drawn: list[float] = []
    for times in _draws(lines, resamples, seed):
        totals = [times @ one for one in counts]
        for row in range(len(times)):
            drawn.append(float(np.mean([score(totals[which][row]) for which in chosen[len(drawn)]])))
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    return Interval(value, low, high, lines)


def standard_error(
    outputs: Sequence[str], references: References, metric: str, resamples: int = 200, seed: int = SEED, **settings: Any
) -> float:
    """Standard error of a score in percent: how far it would vary with other lines of the same kind.

    By the bootstrap for `bleu`, `chrf` and `ter`, by the binomial distribution for `exact_match`. A single line says
    nothing of how much others vary: 100.
    """
    if metric == "exact_match":
        matches = line_matches(outputs, references)
        return proportion_error(sum(matches), len(matches))
    scorer = corpus_metric(metric, **settings)
    counts = _counts(scorer, outputs, references)
    if len(counts) < 2:
        return 100.0
    totals = np.concatenate([times @ counts for times in _draws(len(counts), resamples, seed)])
    return float(np.std([scorer._compute_score_from_stats(total.tolist()).score for total in totals], ddof=1))


def proportion_error(right: int, lines: int) -> float:
    """Standard error of `right` out of `lines`, in percent; of (right + 1) / (lines + 2), so that 0 has one too."""
    share = (right + 1) / (lines + 2)
    return 100 * math.sqrt(share * (1 - share) / lines)


def compare_lines(
    first: Sequence[float | int], second: Sequence[float | int], name: str, resamples: int = RESAMPLES, seed: int = SEED
) -> Comparison:
    """Compare two outputs by any score per line (right or wrong, an F-score): the corpus score is 100 times the mean.

    For two classifiers the scores are `[p == y for p, y in zip(predictions, labels)]` of each, and the name "accuracy".
    """
    if len(first) != len(second):
        raise DataError(f"{name}: {len(first)} lines in the first output and {len(second)} in the second")
    scores = [np.asarray(side, dtype=np.float64).reshape(-1, 1) for side in (first, second)]
    for which, side in zip(("first", "second"), scores, strict=True):
        if not np.isfinite(side).all():
            line = int(np.flatnonzero(~np.isfinite(side))[0]) + 1
            raise DataError(f"{name}: line {line} of the {which} output has the score {side[line - 1, 0]}")
    lines = len(first)
    return _compare(scores[0], scores[1], lambda total: 100 * float(total[0]) / lines, name, "", resamples, seed)


def _counts(metric: Any, lines: Sequence[str], references: References) -> Float[np.ndarray, "N K"]:
    """What a metric of sacreBLEU adds up over the lines: a corpus score is a function of the column sums."""
    streams = reference_streams(lines, references)
    return np.array(metric._extract_corpus_statistics(list(lines), streams), dtype=np.float64)


def _compare(
    first: Float[np.ndarray, "N K"],
    second: Float[np.ndarray, "N K"],
    score: Callable[[Float[np.ndarray, "K"]], float],
    name: str,
    signature: str,
    resamples: int,
    seed: int,
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
    # Two products, not one of both outputs side by side: equal columns then give equal sums to the last bit.
    drawn = np.array(
        [
            score(b) - score(a)
            for times in _draws(lines, resamples, seed)
            for a, b in zip(times @ first, times @ second, strict=True)
        ]
    )
    tie = 1e-12 * max(1.0, *map(abs, whole))  # sums of fractions are equal up to rounding only
    ahead = np.sign(difference) if abs(difference) > tie else 0.0
    not_better = int((drawn * ahead <= tie).sum())
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    p_value = (not_better + 1) / (resamples + 1)
    return Comparison(name, signature, *whole, difference, low, high, p_value, lines, resamples, seed)


def _draws(lines: int, resamples: int, seed: int) -> Iterator[Float[np.ndarray, "R N"]]:
    """How often each line was drawn, for all resamples, some at a time: `lines` draws with replacement each."""
    rng = np.random.default_rng(seed)
    chunk = max(1, CHUNK // lines)
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        drawn = rng.choice(lines, size=(rows, lines), replace=True)
        drawn += lines * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * lines).reshape(rows, lines).astype(np.float64)
