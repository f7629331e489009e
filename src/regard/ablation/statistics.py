"""Tests of the rows of an ablation (modified models) against the base model: effects, standard errors and verdicts.

The loss of row r with seed s is modelled as  y[r, s] = mu[r] + b[s] + e[r, s].  Here mu[r] is the mean of the row, b[s]
is an effect of the seed on all rows (the seed determines the order of the data) with variance tau^2, and e[r, s] is a
residual with variance sigma_r^2. Rows have the seeds 1 .. n. The base (row 0) has the same seeds, called paired, and m
further seeds. The effect of a row is the row's mean minus a weighted mean of the base, in which the paired seeds have
the weight w and the further seeds 1 - w. The variance of the effect is

    V_r = sigma_r^2 / n  +  w^2 sigma_0^2 / n  +  (1 - w)^2 (sigma_0^2 + tau^2) / m  +  (1 - w)^2 tau^2 / n

If all rows have equal variances, V_r is smallest at w = 1 - q a, where q = m / (n + m), v = sigma^2 + tau^2, and
a = sigma^2 / v is the share of a run's variance that the seed does not explain. If the residual variance is small (a
near 0), only the paired seeds count. If seeds have no common effect (a = 1), w weights all runs of the base equally.
Because the estimate of a is poor where a is small, w = 1 - q a^3 is used instead. This costs a few percent of precision
between the two extremes. The share a is estimated from three mean squares. They are independent of all means and, if
variances are equal, of each other. For R rows, their expected values and degrees of freedom are:

    E  of y[r, s] - row mean - seed mean + total mean, over the n shared seeds:  sigma^2,                 R (n - 1)
    B  of the means by seed, times R + 1:                                        sigma^2 + (R+1) tau^2,   (n - 1)
    X  of the base's further seeds:                                              v,                       (m - 1)

Given E, B and X, the effect is unbiased and normal for any variances. Because w depends on the noise of E, B and X, the
estimate of V_r is too small by  2 q (da^3/da) Cov(E - a v, E - a^3 v) / (n v)  (after Kackar and Harville 1984).
This term is added. The variance of the base is always estimated from the base's own paired and further runs. The
variance of a row, sigma_r^2, is estimated in two ways:

    pooled  The mean square E, for rows of similar variance. It has many degrees of freedom, but is too small for a row
            that varies more than others.
    own     The variance of the n runs of the row, after the means of the other rows have been used to remove the
            effects of the seeds. It is correct for any variances, but has only n - 1 degrees of freedom.

The degrees of freedom of a sum of variances are those of Satterthwaite 1946. A row is called better or worse if both
estimates find an effect. The test with the pooled variance is at the familywise level, corrected for all rows by Holm's
procedure. The test with the row's own variance is at OWN times that level, without correction, so that a row that
varies more than the others adds at most OWN * level to the false alarms. When few rows are left in Holm's procedure,
the corrected level is larger than OWN times the level. Then the row's own variance decides alone, at the corrected
level (Welch 1947 with Holm). The simulation in tests/unit/ablation/test_statistics.py confirms 5 % false alarms with
one row up to 10 times as noisy.

If E has fewer than 4 degrees of freedom, the benefit of pairing cannot be estimated, and the mean of the row is
compared with the mean of all runs of the base. The stated error is then too large if seeds have a common effect. In
this case, and for a single row, the own estimate has n - 1 degrees of freedom, the fewest possible, because
Satterthwaite's number is too large for two groups of this size (Mickey and Brown 1966). A row that varies far more than
the others (F test at 1 %, over all rows) would inflate the pooled variance. It is excluded from the pool and judged by
its own variance alone, and OWN is divided by one more than the number of excluded rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, special

from regard.errors import DataError

BETTER, WORSE, NONE = "better", "worse", "no measurable difference"
OWN = 0.2  # fraction of the level at which the test with a row's own variance has to confirm an effect
UNSTEADY = 0.01  # probability that any row is excluded from the pool by chance
FEW = 4  # with fewer degrees of freedom, the benefit of pairing cannot be estimated
NODES = 16  # points for numerical integration over a chi distribution
Runs = Mapping[int, float]  # seed -> measurement


def critical(level: float, freedom: Any) -> Any:
    """Return t with P(|T| >= t) = `level` for Student's t distribution with `freedom` degrees of freedom."""
    return -special.stdtrit(freedom, level / 2)


class Error(NamedTuple):
    """The standard error `size` of an effect, estimated with `freedom` degrees of freedom."""

    size: float
    freedom: float

    def p_value(self, effect: float) -> float:
        """Return the two-sided p-value: the probability of an estimate this far from 0 if the true effect is 0."""
        if not math.isfinite(effect) or not math.isfinite(self.size):
            return 1.0
        if self.size == 0:
            return 1.0 if effect == 0 else 0.0
        return float(2 * special.stdtr(self.freedom, -abs(effect / self.size)))

    def half(self, level: float) -> float:
        """Return half the width of the confidence interval that contains the true effect with probability 1 - level."""
        return float(critical(level, self.freedom)) * self.size if self.size else 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated effect of a modification, with two standard errors.

    `pooled` is estimated from the pooled variance, and `own` is estimated from the modified model's own variance.
    """

    effect: float
    pooled: Error
    own: Error
    steady: bool = True


@dataclass(frozen=True, slots=True)
class Effect:
    """Comparison of a modified model with the base. The interval contains 0 if and only if the verdict is `NONE`.

    `detectable` is the smallest effect detected with the requested power, whatever the effects of other modifications.
    """

    effect: float
    low: float
    high: float
    p_value: float  # from the row's own variance, not corrected for multiple tests
    adjusted: float  # corrected for tests of all rows; compared with the level
    verdict: str
    detectable: float
    steady: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations of the loss over seeds: in total, and without the effects that a seed has on all models."""

    seeds: float  # sqrt(v)
    rest: float | None  # sigma; None if there are too few runs to estimate it
    paired: float | None  # w, the weight of the base's paired seeds; None without pairing


class Fit(NamedTuple):
    """The effects of R modified models and the parts of their variance. Arrays may have leading axes."""

    effect: np.ndarray  # (..., R)
    pooled: np.ndarray  # (...): variance of a run in any row, without effects of seeds
    own: np.ndarray  # (..., R): variance of a run in each row, from its own runs
    base: np.ndarray  # (..., k): parts of the variance of an effect that come from the base
    more: np.ndarray  # (...): other parts of the variance of an effect, treated as known
    runs: int  # n
    freedom: tuple[int, ...]  # degrees of freedom of the pooled variance, then of the parts from the base
    least: bool  # True: own estimates have n - 1 degrees of freedom
    v: np.ndarray  # (...): variance of a run over seeds
    w: np.ndarray  # (...): weight of the base's paired seeds
    paired: bool
    steady: bool = True  # True: the rows are in the pool

    def error(self, variance: np.ndarray, freedom: int, least: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the effects' standard errors and their degrees of freedom, given the variance (..., R) of one run."""
        of_base = np.broadcast_to(self.base[..., None, :], (*variance.shape, self.base.shape[-1]))
        parts = np.concatenate([variance[..., None] / self.runs, of_base], -1)
        df = _freedom(parts, np.array([freedom, *self.freedom[1:]]))
        size = np.sqrt(parts.sum(-1) + self.more[..., None])
        return size, np.full_like(df, freedom) if least else df

    def errors(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Return `error` for the variance pooled over all models, and then for the own variance of each model."""
        pooled = np.broadcast_to(self.pooled[..., None], self.own.shape)
        return self.error(pooled, self.freedom[0]), self.error(self.own, self.runs - 1, self.least)

    def estimates(self) -> list[Estimate]:
        """Return the estimate of every modified model. There must be no leading axes."""
        pooled, own = ([Error(float(s), float(f)) for s, f in zip(*errors, strict=True)] for errors in self.errors())
        return [Estimate(*values, self.steady) for values in zip(self.effect.tolist(), pooled, own, strict=True)]


@dataclass(frozen=True)
class Rule:
    """The significance test of effects. `level` is the familywise significance level (Holm's procedure)."""

    level: float
    apart: int = 0  # rows that are excluded from the pool

    @property
    def confirms(self) -> float:
        """The divisor of the level in the test with a model's own variance."""
        return (1 + self.apart) / OWN

    def alone(self, steady: bool, left: int) -> bool:
        """Return True if, when `left` models remain to be tested, a model is tested using only its own variance."""
        return not steady or left <= self.confirms

    def p_value(self, row: Estimate, left: int) -> float:
        """Return the p-value of a model when `left` models remain to be tested. A larger `left` never reduces it."""
        own = row.own.p_value(row.effect)
        if self.alone(row.steady, left):
            return min(1.0, left * own)
        return min(1.0, max(left * row.pooled.p_value(row.effect), self.confirms * own))

    def half(self, pooled: Error, own: Error, steady: bool, left: int) -> float:
        """Return half the width of an effect's interval, which excludes 0 if and only if the effect is significant."""
        if self.alone(steady, left):
            return own.half(self.level / left)
        return max(pooled.half(self.level / left), own.half(self.level / self.confirms))


def compare(
    base: Runs, rows: Mapping[str, Runs], lower_is_better: bool = True, level: float = 0.05, power: float = 0.8
) -> tuple[dict[str, Effect], Spread]:
    """Test every model against the base. Return the effects, keyed by name, and the `Spread`.

    `level` is the familywise significance level: the probability that any of the models is falsely called different.
    """
    fits, spread = fitted(base, rows)
    estimates = _estimates(fits)
    rule = Rule(level, sum(not row.steady for row in estimates.values()))
    names = [name for name in rows if name in estimates]
    adjusted, left = step_down([estimates[name] for name in names], rule)
    smallest: dict[str, float] = {}
    for members, fit in fits:
        smallest |= dict.fromkeys(members, detectable(fit, rule, len(names), power))
    effects = {}
    for name, corrected, count in zip(names, adjusted, left, strict=True):
        row = estimates[name]
        half = rule.half(row.pooled, row.own, row.steady, count)
        verdict = NONE
        if corrected <= level:
            verdict = BETTER if (row.effect < 0) == lower_is_better else WORSE
        raw = row.own.p_value(row.effect)
        low, high = row.effect - half, row.effect + half
        effects[name] = Effect(row.effect, low, high, raw, corrected, verdict, smallest[name], row.steady)
    return effects, spread


def step_down(estimates: Sequence[Estimate], rule: Rule) -> tuple[list[float], list[int]]:
    """Return p-values adjusted by Holm's procedure (1979), and the number of tests that each was adjusted for.

    The smallest of m p-values is adjusted for m tests, the next for m - 1 tests, and so on. After the first effect that
    is not significant, the returned number stays the same for all remaining models.
    """
    adjusted, left = [0.0] * len(estimates), [0] * len(estimates)
    waiting, largest, stopped = set(range(len(estimates))), 0.0, 0
    while waiting:
        count = len(waiting)
        values = {i: rule.p_value(estimates[i], count) for i in waiting}
        first = min(values, key=lambda i: (values[i], i))
        largest = max(largest, values[first])
        adjusted[first], left[first] = largest, stopped or count
        if not stopped and largest > rule.level:
            stopped = count
        waiting.remove(first)
    return adjusted, left


def detectable(fit: Fit, rule: Rule, rows: int, power: float) -> float:
    """Return the smallest effect that is significant with probability `power` if `rows` modified models are tested.

    The probability is integrated over the sampling distributions of two variances: the model's own and the base's.
    """
    of_base = np.array(fit.base)
    if fit.paired:
        of_base[0] = fit.w**2 * fit.pooled / fit.runs
    sd = math.sqrt(float(fit.pooled / fit.runs + of_base.sum() + fit.more))
    if sd == 0:
        return 0.0
    (x, of_x), (y, of_y) = (_chi_nodes(float(df)) for df in (fit.runs - 1, fit.freedom[1]))
    own, first = np.meshgrid(fit.pooled * np.square(x) / fit.runs, of_base[0] * np.square(y), indexing="ij")
    others = np.broadcast_to(of_base[1:], (*own.shape, len(of_base) - 1))
    weights = np.outer(of_x, of_y)
    limits = np.zeros_like(own)
    alone = rule.alone(fit.steady, rows)
    tests = [(own, fit.runs - 1, rows if alone else rule.confirms, fit.least)]
    if not alone:
        tests.append((np.full_like(own, fit.pooled / fit.runs), fit.freedom[0], rows, False))
    for row, df, count, least in tests:
        parts = np.concatenate([row[..., None], first[..., None], others], -1)
        freedom = np.full_like(row, df) if least else _freedom(parts, np.array([df, *fit.freedom[1:]]))
        size = np.sqrt(parts.sum(-1) + fit.more)
        limits = np.maximum(limits, critical(rule.level / count, freedom) * size / sd)

    def shortfall(shift: float) -> float:
        return power - float((weights * (special.ndtr(shift - limits) + special.ndtr(-shift - limits))).sum())

    root: Any = optimize.brentq(shortfall, 0.0, float(limits.max()) + 40.0, xtol=1e-12)
    return float(root) * sd


def _chi_nodes(freedom: float, nodes: int = NODES) -> tuple[np.ndarray, np.ndarray]:
    """Return points and weights for numerical integration over the distribution of sqrt(chi-square / freedom)."""
    width = 9.0 / math.sqrt(2 * freedom)
    low, high = max(0.0, 1.0 - width), 1.0 + width
    places, weights = np.polynomial.legendre.leggauss(nodes)
    x = low + (places + 1) / 2 * (high - low)
    log_density = (freedom - 1) * np.log(x) - freedom * x * x / 2
    density = weights * np.exp(log_density - log_density.max())
    return x, density / density.sum()


def estimate(base: Runs, rows: Mapping[str, Runs]) -> tuple[dict[str, Estimate], Spread]:
    """Return the estimated effects, keyed by name, and the `Spread`. All rows must have the same seeds."""
    fits, spread = fitted(base, rows)
    return _estimates(fits), spread


Fits = list[tuple[list[str], Fit]]  # the names of rows, and their fit


def _estimates(fits: Fits) -> dict[str, Estimate]:
    return {name: row for names, fit in fits for name, row in zip(names, fit.estimates(), strict=True)}


def fitted(base: Runs, rows: Mapping[str, Runs]) -> tuple[Fits, Spread]:
    """Return the fits and the `Spread`. A model with a far larger variance than the others is fitted alone."""
    seeds_of_rows = {frozenset(runs) for runs in rows.values()}
    if len(seeds_of_rows) > 1 or frozenset() in seeds_of_rows:
        raise DataError(
            "rows have different seeds, but are compared over the same ones; leave out rows that lack a seed"
        )
    seeds = sorted(frozenset().union(*seeds_of_rows))
    if len(base) < 2:
        raise DataError(f"the base has {len(base)} finished runs, but a comparison needs at least 2; use more --seeds")
    if not rows:
        return [], Spread(float(np.std(list(base.values()), ddof=1)), None, None)
    if len(seeds) < 2:
        raise DataError("rows have 1 seed, but a comparison needs at least 2; use more --seeds")
    # Seeds are paired only if the base has all of them.
    pairs = all(seed in base for seed in seeds)
    first = seeds if pairs else list(base)
    of_base = np.array([base[seed] for seed in first], dtype=np.float64)
    further = np.array([value for seed, value in base.items() if seed not in first], dtype=np.float64)
    table = np.array([[runs[seed] for seed in seeds] for runs in rows.values()], dtype=np.float64)
    mask = steady(of_base, table, further)
    fits: Fits = [
        ([name], unpaired(of_base, table[i : i + 1], further)._replace(steady=False))
        for i, name in enumerate(rows)
        if not mask[i]
    ]
    everything = np.concatenate([of_base, further])
    spread = Spread(float(everything.std(ddof=1)), None, None)
    if mask.any():
        fit = paired(of_base, table[mask], further) if pairs else unpaired(of_base, table[mask], further)
        fits.append((list(compress(rows, mask)), fit))
        rest, weight = (math.sqrt(float(fit.pooled)), float(fit.w)) if fit.paired else (None, None)
        spread = Spread(math.sqrt(float(fit.v)), rest, weight)
    return fits, spread


def paired(base: np.ndarray, rows: np.ndarray, further: np.ndarray) -> Fit:
    """Return the fit of `rows` (..., R, n) and `base` (..., n), paired by seed, and of `further` (..., m) base runs."""
    (R, n), m = rows.shape[-2:], further.shape[-1]
    if R * (n - 1) < FEW:
        return unpaired(base, rows, further)
    table = np.concatenate([base[..., None, :], rows], -2)
    means, by_seed = table.mean(-1), table.mean(-2) - table.mean((-2, -1))[..., None]
    residuals = table - means[..., None] - by_seed[..., None, :]
    E = (residuals**2).sum((-2, -1)) / (R * (n - 1))
    B = (R + 1) * (by_seed**2).sum(-1) / (n - 1)
    squares = np.stack([E, B, further.var(-1, ddof=1) if m > 1 else np.zeros_like(E)], -1)
    df = np.array([R * (n - 1), n - 1, max(m - 1, 1)])
    only_E, within, beyond = np.array([1.0, 0, 0]), np.array([R, 1, 0]) / (R + 1), np.array([0, 0, 1.0])
    # v, from the shared seeds and from the further runs of the base, weighted by their degrees of freedom.
    freedom = _freedom(within * squares, df)[..., None]
    share = freedom / (freedom + (m - 1)) if m > 1 else np.ones_like(freedom)
    of_v = share * within + (1 - share) * beyond
    v = (of_v * squares).sum(-1)
    some = np.where(v > 0, v, 1.0)
    a = np.where(v > 0, np.minimum(1.0, E / some), 1.0)
    q = m / (n + m)
    w = 1.0 - q * a**3
    noise = (only_E - a[..., None] * of_v) * (only_E - a[..., None] ** 3 * of_v) * 2 * squares**2 / df
    reference = w * means[..., 0] + ((1 - w) * further.mean(-1) if m else 0.0)
    # The difference between a run and the mean of the R others has the variance sigma_r^2 + sigma^2 / R.
    others = (table.sum(-2, keepdims=True) - table) / R
    against = (table - others).var(-1, ddof=1)
    own = np.maximum(against - E[..., None] / R, against * R / (R + 1))
    lone = squares[..., 2] if m > 1 else v
    return Fit(
        effect=means[..., 1:] - reference[..., None],
        pooled=E,
        own=own[..., 1:],
        base=np.stack([w**2 * own[..., 0] / n, (1 - w) ** 2 * lone / max(m, 1)], -1),
        more=(1 - w) ** 2 * np.maximum(v - E, 0.0) / n + 6 * q * a**2 * noise.sum(-1) / (n * some),
        runs=n,
        freedom=(R * (n - 1), n - 1, max(m - 1, 1) if m > 1 else n - 1),
        least=R == 1,
        v=v,
        w=w,
        paired=True,
    )


def unpaired(base: np.ndarray, rows: np.ndarray, further: np.ndarray) -> Fit:
    """Return the fit without pairing by seed: `rows` (..., R, n) against the mean of all runs of the base."""
    runs = np.concatenate([base, further], -1)
    (R, n), N = rows.shape[-2:], runs.shape[-1]
    own, of_base = rows.var(-1, ddof=1), runs.var(-1, ddof=1)
    pooled = own.mean(-1)
    df = (R * (n - 1), N - 1)
    return Fit(
        effect=rows.mean(-1) - runs.mean(-1)[..., None],
        pooled=pooled,
        own=own,
        base=of_base[..., None] / N,
        more=np.zeros_like(pooled),
        runs=n,
        freedom=df,
        least=True,
        v=(df[0] * pooled + df[1] * of_base) / sum(df),
        w=np.full_like(pooled, n / N),
        paired=False,
    )


def steady(base: np.ndarray, rows: np.ndarray, further: np.ndarray) -> np.ndarray:
    """Return a mask of the modified models with similar variances, given the losses `rows` (R, n) of their runs.

    Repeatedly exclude the model with the largest variance, until an F test no longer finds it larger than that of the
    remaining models.
    """
    runs = np.concatenate([base, further])
    own, of_base, df = rows.var(-1, ddof=1), float(runs.var(ddof=1)), rows.shape[-1] - 1
    left = np.ones(len(rows), dtype=bool)
    while left.any():
        most = int(np.where(left, own, -1.0).argmax())
        others = (int(left.sum()) - 1) * df + len(runs) - 1
        rest = (float(own[left].sum() - own[most]) * df + of_base * (len(runs) - 1)) / others
        ratio = float(own[most]) / rest if rest > 0 else math.inf if own[most] > 0 else 1.0
        if special.fdtrc(df, others, ratio) >= UNSTEADY / len(rows):
            break
        left[most] = False
    return left


def _freedom(parts: np.ndarray, df: np.ndarray) -> np.ndarray:
    """Return Satterthwaite's (1946) degrees of freedom of a sum of `parts` (..., k) with degrees of freedom `df`."""
    below = (parts**2 / df).sum(-1)
    return np.where(below > 0, parts.sum(-1) ** 2 / np.where(below > 0, below, 1.0), float(df.sum()))
