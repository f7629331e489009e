"""Is a row better than the base, or did it only meet luckier seeds?

The model of a table of losses is  y[r, s] = mu[r] + b[s] + e[r, s]:  a mean for each row, what a seed does to all rows
(its order of the data), variance tau^2, and what it does to one of them, variance sigma^2. Rows have the seeds 1 .. n,
the base these and m more. Three mean squares are independent of all means and of each other:

    E  of the residuals y[r, s] - row - seed + all, over the n seeds that all have:   sigma^2,             (R)(n - 1)
    B  of the seeds' means, times R + 1:                                              sigma^2 + (R+1) tau^2,  (n - 1)
    X  of the base's further seeds:                                                   v = sigma^2 + tau^2,    (m - 1)

The effect of a row is the mean of its seeds less a mean of the base, the paired seeds with weight w, the further ones
with 1 - w. Its variance is  V = 2 w sigma^2 / n + (1 - w)^2 v / (n q)  with q = m / (n + m).  It is least at
w = 1 - q a, where a = sigma^2 / v is the share of a run's variance that its seed does not explain: pairing alone where
a seed does the same to all rows, the mean of all the base's runs where it does not. Since a is estimated, and badly
where it is small, we take w = 1 - q a^3, which gives away a few percent of precision between the two ends. Weight and
variance come from E, B and X alone: given them, the effect is unbiased and normal. That w follows their noise makes the
estimate of V too small by  2 q (da^3/da) Cov(E - a v, E - a^3 v) / (n v)  (after Kackar and Harville 1984), which is
added; the degrees of freedom are Satterthwaite's. With fewer than 4 degrees of freedom for E there is no telling what
pairing is worth: then means are compared with means, and what seeds have in common makes the true error smaller than
the one stated.

All rows share these variances. A row that varies far more than the others (F test at 1 %, over all rows) would blur all
verdicts: it is set apart and judged by its own variance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from regard.ablation.distributions import critical, detectable_shift, f_above, shrinkage, two_sided
from regard.errors import DataError

BETTER, WORSE, NONE = "better", "worse", "no measurable difference"
UNSTEADY = 0.01  # chance that any row at all is set apart for nothing
FEW = 4  # degrees of freedom below which the worth of pairing cannot be told
Runs = Mapping[int, float]  # seed -> what was measured


@dataclass(frozen=True, slots=True)
class Estimate:
    """The effect of a row, its standard error, and the degrees of freedom of that."""

    effect: float
    error: float
    freedom: float
    steady: bool = True

    @property
    def p_value(self) -> float:
        """The chance of an effect at least as large where there is none."""
        if self.error == 0:
            return 1.0 if self.effect == 0 else 0.0
        return two_sided(self.effect / self.error, self.freedom)


@dataclass(frozen=True, slots=True)
class Effect:
    """A row against the base. The interval is at the level at which Holm tests the row: it holds 0 if nothing is found.

    `detectable` is the smallest effect that would be found with the power asked for, whatever the other rows do.
    """

    effect: float
    low: float
    high: float
    p_value: float
    adjusted: float  # Holm's, to be compared with the level
    verdict: str
    detectable: float
    steady: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """How runs vary: of one model over seeds, and what is left of it once the seed is accounted for."""

    seeds: float  # sqrt(v)
    rest: float | None  # sigma; None where too few runs can tell
    paired: float | None  # w, the weight of the base's paired seeds; None: nothing is paired


def compare(
    base: Runs, rows: Mapping[str, Runs], lower_is_better: bool = True, level: float = 0.05, power: float = 0.8
) -> tuple[dict[str, Effect], Spread]:
    """Every row against the base, at a familywise `level`."""
    found, spread = estimate(base, rows)
    names = list(found)
    p = [found[name].p_value for name in names]
    adjusted, levels = holm(p, level)
    effects = {}
    for name, raw, corrected, own in zip(names, p, adjusted, levels, strict=True):
        one = found[name]
        half = critical(own, one.freedom) * one.error
        verdict = NONE
        if corrected <= level:
            verdict = BETTER if (one.effect < 0) == lower_is_better else WORSE
        effects[name] = Effect(
            one.effect,
            one.effect - half,
            one.effect + half,
            raw,
            corrected,
            verdict,
            detectable_shift(level / len(names), one.freedom, power) * one.error / shrinkage(one.freedom),
            one.steady,
        )
    return effects, spread


def holm(p: Sequence[float], level: float = 0.05) -> tuple[list[float], list[float]]:
    """Holm 1979: adjusted p values, and the level at which each was tested.

    The smallest p is compared with level / m, the next with level / (m - 1), ..., until one fails; all after it are
    held to the level of the one that failed.
    """
    count = len(p)
    adjusted, levels = [0.0] * count, [0.0] * count
    largest, stopped = 0.0, None
    for rank, i in enumerate(sorted(range(count), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (count - rank) * p[i]))
        adjusted[i] = largest
        levels[i] = stopped or level / (count - rank)
        if stopped is None and largest > level:
            stopped = levels[i]
    return adjusted, levels


def estimate(base: Runs, rows: Mapping[str, Runs]) -> tuple[dict[str, Estimate], Spread]:
    """The effect of every row, all of which have the same seeds; the base has them and more."""
    seeds = _seeds(rows)
    if len(base) < 2:
        raise DataError(f"the base has {len(base)} finished runs; at least 2 say how runs vary")
    steady = _steady(base, rows) if len(seeds) > 1 else set(rows)
    paired = sorted(seeds & base.keys())
    pool = {name: runs for name, runs in rows.items() if name in steady}
    # A seed that the base lacks cannot be paired, and then none is.
    freedom = len(pool) * (len(seeds) - 1) if len(paired) == len(seeds) else 0
    found, spread = _paired(base, pool, paired) if freedom >= FEW else _unpaired(base, pool)
    apart = {name: _apart(base, rows[name]) for name in rows if name not in steady}
    return {name: found.get(name) or apart[name] for name in rows}, spread


def _seeds(rows: Mapping[str, Runs]) -> set[int]:
    seeds = {frozenset(runs) for runs in rows.values()}
    if len(seeds) > 1 or frozenset() in seeds:
        raise DataError("rows are compared over the same seeds; leave out those that lack one")
    return set(seeds.pop()) if seeds else set()


def _paired(base: Runs, rows: Mapping[str, Runs], paired: list[int]) -> tuple[dict[str, Estimate], Spread]:
    n, further = len(paired), np.array([value for seed, value in base.items() if seed not in paired])
    m, R = len(further), len(rows)
    table = np.array([[runs[seed] for seed in paired] for runs in (base, *rows.values())], dtype=np.float64)
    means = table.mean(1)
    by_seed = table.mean(0) - table.mean()
    residuals = table - means[:, None] - by_seed
    squares = [float((residuals**2).sum()) / (R * (n - 1)), (R + 1) * float((by_seed**2).sum()) / (n - 1)]
    squares, df = (
        np.array([*squares, further.var(ddof=1) if m > 1 else 0.0]),
        np.array([R * (n - 1), n - 1, max(m - 1, 1)]),
    )
    only_E, within, beyond = np.array([1.0, 0, 0]), np.array([R, 1, 0]) / (R + 1), np.array([0, 0, 1.0])
    # v, from within the rows and from the further runs of the base, each weighted by what it is worth.
    worth = _freedom(within * squares, df)
    share = worth / (worth + (m - 1)) if m > 1 else 1.0
    of_v = share * within + (1 - share) * beyond
    E, v = float(squares[0]), float(of_v @ squares)
    a = min(1.0, E / v) if v > 0 else 1.0
    q = m / (n + m)
    w = 1.0 - q * a**3
    of_variance = 2 * w / n * only_E + (q * a**6 / n) * of_v
    variance = float(of_variance @ squares)
    if v > 0:
        noise = (only_E - a * of_v) * (only_E - a**3 * of_v) * 2 * squares**2 / df
        variance += 6 * q * a**2 * float(noise.sum()) / (n * v)
    reference = float(w * means[0] + ((1 - w) * further.mean() if m else 0.0))
    error, freedom = math.sqrt(variance), _freedom(of_variance * squares, df)
    found = {
        name: Estimate(mean - reference, error, freedom) for name, mean in zip(rows, means[1:].tolist(), strict=True)
    }
    return found, Spread(math.sqrt(v), math.sqrt(E), w)


def _unpaired(base: Runs, rows: Mapping[str, Runs]) -> tuple[dict[str, Estimate], Spread]:
    squares, df = _within([base, *rows.values()])
    v = squares / df
    found = {
        name: Estimate(_mean(runs) - _mean(base), math.sqrt(v * (1 / len(runs) + 1 / len(base))), df)
        for name, runs in rows.items()
    }
    return found, Spread(math.sqrt(v), None, None)


def _apart(base: Runs, runs: Runs) -> Estimate:
    """Welch: a row that varies in its own way, against all runs of the base."""
    groups = [np.array(list(group.values())) for group in (runs, base)]
    parts = np.array([group.var(ddof=1) / len(group) for group in groups])
    freedom = _freedom(parts, np.array([len(group) - 1 for group in groups]))
    return Estimate(_mean(runs) - _mean(base), math.sqrt(float(parts.sum())), freedom, steady=False)


def _steady(base: Runs, rows: Mapping[str, Runs]) -> set[str]:
    """Rows that vary as the others do: the most varied is set apart while an F test against the rest asks for it."""
    left = dict(rows)
    while left:
        name = max(left, key=lambda name: float(np.var(list(left[name].values()))))
        own, df = _within([left[name]])
        squares, others = _within([base, *(runs for other, runs in left.items() if other != name)])
        ratio = own / df / (squares / others) if squares else math.inf if own else 1.0
        if f_above(ratio, df, others) >= UNSTEADY / len(rows):
            break
        del left[name]
    return set(left)


def _within(groups: Sequence[Runs]) -> tuple[float, float]:
    """The sum of squares around the groups' means, and its degrees of freedom."""
    values = [np.array(list(group.values())) for group in groups]
    return float(sum(((one - one.mean()) ** 2).sum() for one in values)), float(sum(len(one) - 1 for one in values))


def _mean(runs: Runs) -> float:
    return float(np.mean(list(runs.values())))


def _freedom(parts: np.ndarray, df: np.ndarray) -> float:
    """The degrees of freedom of a sum of mean squares, each times its share (Satterthwaite 1946)."""
    below = float((parts**2 / df).sum())
    return float(parts.sum()) ** 2 / below if below > 0 else float(df.sum())
