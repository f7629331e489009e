"""Is a row better than the base, or did it only meet luckier seeds?

The model of a table of losses is  y[r, s] = mu[r] + b[s] + e[r, s]:  a mean for each row, what a seed does to all rows
(its order of the data), variance tau^2, and what it does to one of them, variance sigma_r^2. Rows have seeds 1 .. n,
the base these and m more. The effect of a row is the mean of its seeds less a mean of the base, the paired seeds with
weight w, the further ones with 1 - w. Its variance is

    V_r = sigma_r^2 / n  +  w^2 sigma_0^2 / n  +  (1 - w)^2 (sigma_0^2 + tau^2) / m  +  (1 - w)^2 tau^2 / n

With equal variances it is least at w = 1 - q a, where q = m / (n + m) and a = sigma^2 / v, v = sigma^2 + tau^2, is the
share of a run's variance that its seed does not explain: pairing alone where a seed does the same to all rows, the mean
of all the base's runs where it does not. a is estimated, and badly where it is small; so we take w = 1 - q a^3, which
gives away a few percent of precision between the two ends. a comes from three mean squares that are independent of all
means and, with equal variances, of each other:

    E  of the residuals y[r, s] - row - seed + all, over the n seeds that all have:   sigma^2,             (R)(n - 1)
    B  of the seeds' means, times R + 1:                                              sigma^2 + (R+1) tau^2,  (n - 1)
    X  of the base's further seeds:                                                   v,                      (m - 1)

Given them the effect is unbiased and normal, whatever the variances are. That w follows their noise makes the estimate
of V too small by  2 q (da^3/da) Cov(E - a v, E - a^3 v) / (n v)  (after Kackar and Harville 1984), which is added. The
base's variance is always its own, from its paired and its further runs. That of the row, sigma_r^2, is estimated twice:

    pooled  E: rows vary alike. Many degrees of freedom, but too small for a row that varies more than the others.
    own     from its own n runs, their seeds' effects taken off by the means of the other rows: right for any variances,
            with n - 1 degrees of freedom.

Degrees of freedom of the sums are Satterthwaite's. A row is called better or worse if both estimates find an effect:
the pooled one at the familywise level, shared by Holm over all rows, and the row's own at OWN of that level, unshared.
A row that varies more than the others then adds at most OWN * level to the false alarms. Holm's share of the level is
larger than that once few rows are left; then the own variance alone decides, at that share (Welch 1947 with Holm). The
simulation of tests/unit/ablation/test_statistics.py holds this to 5 % with one row up to 10 times as noisy.

With fewer than 4 degrees of freedom for E there is no telling what pairing is worth: means are compared with means,
and what seeds have in common makes the true error smaller than the one stated. There, and for a single row, the own
estimate has n - 1 degrees of freedom, the fewest there can be, since Satterthwaite's are too many for two groups this
small (Mickey and Brown 1966). A row that varies far more than the others (F test at 1 %, over all rows) would blur the
pool: it is set apart and judged by its own variance alone, and OWN is divided by one more than the number of such rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from regard.ablation.distributions import chi, critical, f_above, root, two_sided
from regard.errors import DataError

BETTER, WORSE, NONE = "better", "worse", "no measurable difference"
OWN = 0.2  # share of the level at which a row's own variance has to confirm what the pooled one found
UNSTEADY = 0.01  # chance that any row at all is set apart for nothing
FEW = 4  # degrees of freedom below which the worth of pairing cannot be told
NODES = 16  # where a chance is integrated numerically
Runs = Mapping[int, float]  # seed -> what was measured


class Error(NamedTuple):
    """The standard error of an effect, and its degrees of freedom."""

    size: float
    freedom: float

    def p_value(self, effect: float) -> float:
        """The chance of an effect at least as large where there is none."""
        if not math.isfinite(effect) or not math.isfinite(self.size):
            return 1.0
        if self.size == 0:
            return 1.0 if effect == 0 else 0.0
        return two_sided(effect / self.size, self.freedom)

    def half(self, level: float) -> float:
        """Half the width of the interval that holds the effect with probability 1 - level."""
        return critical(level, self.freedom) * self.size if self.size else 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """The effect of a row, and its error by the pooled variance of all rows and by the row's own."""

    effect: float
    pooled: Error
    own: Error
    steady: bool = True


@dataclass(frozen=True, slots=True)
class Effect:
    """A row against the base. The interval is at the level at which the row is tested: it holds 0 if nothing is found.

    `detectable` is the smallest effect that would be found with the power asked for, whatever the other rows do.
    """

    effect: float
    low: float
    high: float
    p_value: float  # by the row's own variance, uncorrected
    adjusted: float  # for all rows, to be compared with the level
    verdict: str
    detectable: float
    steady: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """How runs vary: of one model over seeds, and what is left of it once the seed is accounted for."""

    seeds: float  # sqrt(v)
    rest: float | None  # sigma; None where too few runs can tell
    paired: float | None  # w, the weight of the base's paired seeds; None: nothing is paired


class Fit(NamedTuple):
    """Effects of R rows and the parts of their variance, for one table or for many at once (leading axes)."""

    effect: np.ndarray  # (..., R)
    pooled: np.ndarray  # (...): variance of a run of any row, seeds accounted for
    own: np.ndarray  # (..., R): the same of each row, from its own runs
    base: np.ndarray  # (..., k): what the base adds to the variance of an effect
    more: np.ndarray  # (...): and what else does, of which the noise is not counted
    runs: int  # n
    freedom: tuple[int, ...]  # of the pooled variance, then of the parts of the base
    least: bool  # own estimates have n - 1 degrees of freedom, whatever the base adds
    v: np.ndarray  # (...): variance of a run over seeds
    w: np.ndarray  # (...): weight of the base's paired seeds
    paired: bool

    def error(self, variance: np.ndarray, freedom: int, least: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Standard errors of effects and their degrees of freedom, given the variance (..., R) of runs of the rows."""
        of_base = np.broadcast_to(self.base[..., None, :], (*variance.shape, self.base.shape[-1]))
        parts = np.concatenate([variance[..., None] / self.runs, of_base], -1)
        df = _freedom(parts, np.array([freedom, *self.freedom[1:]]))
        size = np.sqrt(parts.sum(-1) + self.more[..., None])
        return size, np.full_like(df, freedom) if least else df

    def errors(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """The errors by the pooled variance, and by each row's own."""
        pooled = np.broadcast_to(self.pooled[..., None], self.own.shape)
        return self.error(pooled, self.freedom[0]), self.error(self.own, self.runs - 1, self.least)

    def estimates(self, steady: bool = True) -> list[Estimate]:
        """Of one table."""
        pooled, own = ([Error(float(s), float(f)) for s, f in zip(*found, strict=True)] for found in self.errors())
        effects = self.effect.tolist()
        return [Estimate(*one, steady) for one in zip(effects, pooled, own, strict=True)]


@dataclass(frozen=True)
class Rule:
    """When an effect counts as found, among those of other rows."""

    level: float
    apart: int = 0  # rows that are set apart

    @property
    def confirms(self) -> float:
        """1 / the share of the level at which a row's own variance has to confirm the pooled one."""
        return (1 + self.apart) / OWN

    def alone(self, steady: bool, left: int) -> bool:
        """Return True if a row is judged by its own variance alone, with so many rows left in Holm's procedure."""
        return not steady or left <= self.confirms

    def p_value(self, one: Estimate, left: int) -> float:
        """Return the p-value that Holm's procedure uses with so many rows left; it never falls as rows are added."""
        own = one.own.p_value(one.effect)
        if self.alone(one.steady, left):
            return min(1.0, left * own)
        return min(1.0, max(left * one.pooled.p_value(one.effect), self.confirms * own))

    def half(self, pooled: Error, own: Error, steady: bool, left: int) -> float:
        """Half the width of the interval that leaves out 0 exactly if the effect is found."""
        if self.alone(steady, left):
            return own.half(self.level / left)
        return max(pooled.half(self.level / left), own.half(self.level / self.confirms))


def compare(
    base: Runs, rows: Mapping[str, Runs], lower_is_better: bool = True, level: float = 0.05, power: float = 0.8
) -> tuple[dict[str, Effect], Spread]:
    """Every row against the base, at a familywise `level`."""
    fits, spread = fitted(base, rows)
    found = _estimates(fits)
    rule = Rule(level, sum(not one.steady for one in found.values()))
    names = [name for name in rows if name in found]
    adjusted, left = step_down([found[name] for name in names], rule)
    smallest: dict[str, float] = {}
    for members, fit, alike in fits:
        smallest |= dict.fromkeys(members, detectable(fit, alike, rule, len(names), power))
    effects = {}
    for name, corrected, many in zip(names, adjusted, left, strict=True):
        one = found[name]
        half = rule.half(one.pooled, one.own, one.steady, many)
        verdict = NONE
        if corrected <= level:
            verdict = BETTER if (one.effect < 0) == lower_is_better else WORSE
        raw = one.own.p_value(one.effect)
        low, high = one.effect - half, one.effect + half
        effects[name] = Effect(one.effect, low, high, raw, corrected, verdict, smallest[name], one.steady)
    return effects, spread


def step_down(estimates: Sequence[Estimate], rule: Rule) -> tuple[list[float], list[int]]:
    """Holm 1979: p values adjusted for all rows, and how many rows were left when each was tested.

    The row that is found most clearly is tested first, as one of m, the next as one of m - 1, ..., until one fails; all
    that are left then were tested together.
    """
    adjusted, left = [0.0] * len(estimates), [0] * len(estimates)
    waiting, largest, stopped = set(range(len(estimates))), 0.0, 0
    while waiting:
        many = len(waiting)
        values = {i: rule.p_value(estimates[i], many) for i in waiting}
        first = min(values, key=lambda i: (values[i], i))
        largest = max(largest, values[first])
        adjusted[first], left[first] = largest, stopped or many
        if not stopped and largest > rule.level:
            stopped = many
        waiting.remove(first)
    return adjusted, left


def detectable(fit: Fit, steady: bool, rule: Rule, rows: int, power: float) -> float:
    """The smallest effect that is found with probability `power` among so many rows, where all vary as in the pool.

    By chance a row's own runs, and those of the base, may vary less or more: P(found) is the mean over both.
    """
    of_base = np.array(fit.base)
    if fit.paired:
        of_base[0] = fit.w**2 * fit.pooled / fit.runs
    sd = math.sqrt(float(fit.pooled / fit.runs + of_base.sum() + fit.more))
    if sd == 0:
        return 0.0
    (x, of_x), (y, of_y) = (chi(float(df), NODES) for df in (fit.runs - 1, fit.freedom[1]))
    own, first = np.meshgrid(fit.pooled * np.square(x) / fit.runs, of_base[0] * np.square(y), indexing="ij")
    others = np.broadcast_to(of_base[1:], (*own.shape, len(of_base) - 1))
    weights = np.outer(of_x, of_y)
    limits = np.zeros_like(own)
    share = rows if rule.alone(steady, rows) else rule.confirms
    for row, df, tests, least in (
        (own, fit.runs - 1, share, fit.least),
        (np.full_like(own, fit.pooled / fit.runs), fit.freedom[0], 0 if rule.alone(steady, rows) else rows, False),
    ):
        if tests:
            parts = np.concatenate([row[..., None], first[..., None], others], -1)
            freedom = np.full_like(row, df) if least else _freedom(parts, np.array([df, *fit.freedom[1:]]))
            size = np.sqrt(parts.sum(-1) + fit.more)
            limits = np.maximum(limits, _criticals(rule.level / tests, freedom) * size / sd)
    pairs = list(zip((limits / math.sqrt(2)).ravel().tolist(), (weights / 2).ravel().tolist(), strict=True))

    def found(shift: float) -> float:
        z = shift / math.sqrt(2)  # P(Z >= z sqrt 2) = erfc(z) / 2
        return sum(weight * (math.erfc(limit - z) + math.erfc(limit + z)) for limit, weight in pairs)

    return root(lambda shift: found(shift) - power, 1e6) * sd


def _criticals(level: float, freedom: np.ndarray) -> np.ndarray:
    """`critical` of many degrees of freedom, between some of which it is interpolated."""
    known = np.geomspace(freedom.min(), freedom.max() * (1 + 1e-9), NODES)
    values = [critical(level, float(df)) for df in known]
    return np.exp(np.interp(np.log(freedom), np.log(known), np.log(values)))


def estimate(base: Runs, rows: Mapping[str, Runs]) -> tuple[dict[str, Estimate], Spread]:
    """The effect of every row, all of which have the same seeds; the base has them and more."""
    fits, spread = fitted(base, rows)
    return _estimates(fits), spread


Fits = list[tuple[list[str], Fit, bool]]  # the rows of each fit, and whether they are steady


def _estimates(fits: Fits) -> dict[str, Estimate]:
    return {name: one for names, fit, steady in fits for name, one in zip(names, fit.estimates(steady), strict=True)}


def fitted(base: Runs, rows: Mapping[str, Runs]) -> tuple[Fits, Spread]:
    """The fit of all rows that vary alike, and one for each that does not; and how runs vary."""
    seeds = sorted(_seeds(rows))
    if len(base) < 2:
        raise DataError(f"the base has {len(base)} finished runs; at least 2 say how runs vary")
    if not rows:
        return [], Spread(float(np.std(list(base.values()), ddof=1)), None, None)
    if len(seeds) < 2:
        raise DataError("rows have 1 seed; at least 2 say how a row varies")
    # A seed that the base lacks cannot be paired, and then none is.
    pairs = all(seed in base for seed in seeds)
    first = seeds if pairs else list(base)
    of_base = np.array([base[seed] for seed in first], dtype=np.float64)
    further = np.array([value for seed, value in base.items() if seed not in first], dtype=np.float64)
    table = np.array([[runs[seed] for seed in seeds] for runs in rows.values()], dtype=np.float64)
    mask = steady(of_base, table, further)
    names = np.array(list(rows))
    fits: Fits = [([str(names[i])], unpaired(of_base, table[i : i + 1], further), False) for i in np.flatnonzero(~mask)]
    everything = np.concatenate([of_base, further])
    spread = Spread(float(everything.std(ddof=1)), None, None)
    if mask.any():
        fit = paired(of_base, table[mask], further) if pairs else unpaired(of_base, table[mask], further)
        fits.append(([str(name) for name in names[mask]], fit, True))
        told = fit.paired
        spread = Spread(
            math.sqrt(float(fit.v)), math.sqrt(float(fit.pooled)) if told else None, float(fit.w) if told else None
        )
    return fits, spread


def _seeds(rows: Mapping[str, Runs]) -> set[int]:
    seeds = {frozenset(runs) for runs in rows.values()}
    if len(seeds) > 1 or frozenset() in seeds:
        raise DataError("rows are compared over the same seeds; leave out those that lack one")
    return set(seeds.pop()) if seeds else set()


def paired(base: np.ndarray, rows: np.ndarray, further: np.ndarray) -> Fit:
    """Rows (..., R, n) against a base with the same seeds (..., n) and further ones (..., m)."""
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
    # v, from within the rows and from the further runs of the base, each weighted by what it is worth.
    worth = _freedom(within * squares, df)[..., None]
    share = worth / (worth + (m - 1)) if m > 1 else np.ones_like(worth)
    of_v = share * within + (1 - share) * beyond
    v = (of_v * squares).sum(-1)
    some = np.where(v > 0, v, 1.0)
    a = np.where(v > 0, np.minimum(1.0, E / some), 1.0)
    q = m / (n + m)
    w = 1.0 - q * a**3
    noise = (only_E - a[..., None] * of_v) * (only_E - a[..., None] ** 3 * of_v) * 2 * squares**2 / df
    reference = w * means[..., 0] + ((1 - w) * further.mean(-1) if m else 0.0)
    # Against the mean of the R others a run varies by sigma_r^2 + sigma^2 / R.
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
    """Rows (..., R, n) against the mean of all runs of the base; its first (..., k) and further ones (..., m)."""
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
    """Which rows (R, n) vary as the others do: the most varied is set apart while an F test against the rest asks."""
    runs = np.concatenate([base, further])
    own, of_base, df = rows.var(-1, ddof=1), float(runs.var(ddof=1)), rows.shape[-1] - 1
    left = np.ones(len(rows), dtype=bool)
    while left.any():
        most = int(np.where(left, own, -1.0).argmax())
        others = (int(left.sum()) - 1) * df + len(runs) - 1
        rest = (float(own[left].sum() - own[most]) * df + of_base * (len(runs) - 1)) / others
        ratio = float(own[most]) / rest if rest > 0 else math.inf if own[most] > 0 else 1.0
        if f_above(ratio, float(df), float(others)) >= UNSTEADY / len(rows):
            break
        left[most] = False
    return left


def _freedom(parts: np.ndarray, df: np.ndarray) -> np.ndarray:
    """The degrees of freedom of a sum of mean squares (..., k), each times its share (Satterthwaite 1946)."""
    below = (parts**2 / df).sum(-1)
    return np.where(below > 0, parts.sum(-1) ** 2 / np.where(below > 0, below, 1.0), float(df.sum()))
