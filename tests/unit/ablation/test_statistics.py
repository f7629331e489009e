"""Verdicts: the documented rates of false alarms and of detected effects."""

import math

import numpy as np
import pytest
from scipy import stats

from regard.ablation.statistics import (
    BETTER,
    NONE,
    OWN,
    WORSE,
    Error,
    Estimate,
    Rule,
    _chi_nodes,
    compare,
    critical,
    estimate,
    paired,
    steady,
    step_down,
    unpaired,
)
from regard.errors import DataError

LEVEL = 0.05


def runs(values: np.ndarray) -> dict[int, float]:
    return dict(enumerate(values.tolist(), 1))


def simulate_tables(seed: int, shape: tuple[int, int, int], tau: float, sd: np.ndarray | None = None) -> np.ndarray:
    """Simulate losses (tables, 1 + rows, 3 x seeds) of a base and rows; standard deviations are 1 if not given."""
    count, rows, seeds = shape
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((count, rows + 1, 3 * seeds)) * (1.0 if sd is None else sd[:, None])
    return noise + tau * rng.standard_normal((count, 1, 3 * seeds)) + 5.0


def simulate(rng: np.random.Generator, rows: int, seeds: int, tau: float, planted: float = 0.0) -> tuple[dict, dict]:
    """Simulate the losses of a base and rows. The first row has the true effect `planted`."""
    y = simulate_tables(int(rng.integers(2**31)), (1, rows, seeds), tau)[0]
    y[1] += planted
    return runs(y[0]), {f"row {r}": runs(y[r, :seeds]) for r in range(1, rows + 1)}


def alarms(tables: np.ndarray, seeds: int) -> np.ndarray:
    """Return a mask (tables, rows) of verdicts other than NONE. Tables with the same pool share a fit."""
    base, rows, further = tables[:, 0, :seeds], tables[:, 1:, :seeds], tables[:, 0, seeds:]
    count = rows.shape[1]
    masks = np.array([steady(*arrays) for arrays in zip(base, rows, further, strict=True)])
    significant = np.zeros(masks.shape, dtype=bool)
    for mask in np.unique(masks, axis=0):
        at = np.flatnonzero((masks == mask).all(1))
        rule = Rule(LEVEL, int((~mask).sum()))
        fits = [
            (np.array([i]), unpaired(base[at], rows[at][:, [i]], further[at]), False) for i in np.flatnonzero(~mask)
        ]
        if mask.any():
            fits.append((np.flatnonzero(mask), paired(base[at], rows[at][:, mask], further[at]), True))
        for names, fit, in_pool in fits:
            pooled, own = fit.errors()
            # An effect below the normal distribution's limit is never significant. Test only the others.
            least = stats.norm.isf(LEVEL / 2 / np.array([1 if rule.alone(in_pool, count) else count, rule.confirms]))
            near = (np.abs(fit.effect) >= least[0] * pooled[0]) | rule.alone(in_pool, count)
            near &= np.abs(fit.effect) >= (0 if rule.alone(in_pool, count) else least[1]) * own[0]
            near &= np.abs(fit.effect) >= stats.norm.isf(LEVEL / 2) * own[0]
            for i, j in np.argwhere(near):
                first, second = (Error(float(size[i, j]), float(df[i, j])) for size, df in (pooled, own))
                p = rule.p_value(Estimate(float(fit.effect[i, j]), first, second, in_pool), count)
                significant[at[i], names[j]] = p <= LEVEL
    return significant


def most_alarms(count: int) -> float:
    """Return the bound that the fraction of false alarms at a level of 5 % exceeds in 1 of 700 simulations."""
    return LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / count)


@pytest.mark.parametrize("ratio", [1.0, 2.5, 3.0, 10.0])
@pytest.mark.parametrize(
    ("rows", "seeds", "tau"), [(4, 3, 0.0), (12, 3, 0.0), (12, 3, 2.0), (52, 3, 0.0), (12, 5, 0.0)]
)
def test_false_alarms_are_at_most_5_percent_with_a_noisy_row(rows: int, seeds: int, tau: float, ratio: float) -> None:
    """With the pooled variance alone, 12 to 40 % would be false alarms if a row is 2.5 to 10 times as noisy."""
    count = 1000
    sd = np.ones(rows + 1)
    sd[1] = ratio
    assert alarms(simulate_tables(7, (count, rows, seeds), tau, sd), seeds).any(1).mean() <= most_alarms(count)


@pytest.mark.parametrize("seeds", [3, 5])
def test_false_alarms_are_at_most_5_percent_with_a_noisy_base(seeds: int) -> None:
    sd = np.ones(13)
    sd[0] = 3.0
    assert alarms(simulate_tables(8, (1000, 12, seeds), 0.0, sd), seeds).any(1).mean() <= most_alarms(1000)


@pytest.mark.parametrize(("rows", "seeds", "tau"), [(1, 2, 0.0), (1, 3, 0.0), (1, 5, 5.0), (4, 2, 1.0), (2, 3, 1.0)])
def test_false_alarms_of_few_rows(rows: int, seeds: int, tau: float) -> None:
    for ratio in (1.0, 3.0):
        sd = np.ones(rows + 1)
        sd[1] = ratio
        assert alarms(simulate_tables(9, (1000, rows, seeds), tau, sd), seeds).any(1).mean() <= most_alarms(1000)


@pytest.mark.parametrize(("rows", "seeds", "tau"), [(4, 3, 0.0), (12, 3, 2.0), (12, 5, 0.0)])
def test_the_detectable_effect_is_detected_with_its_power(rows: int, seeds: int, tau: float) -> None:
    rng = np.random.default_rng(3)
    stated = [compare(*simulate(rng, rows, seeds, tau))[0]["row 2"].detectable for _ in range(5)]
    tables = simulate_tables(4, (500, rows, seeds), tau)
    tables[:, 1] -= float(np.median(stated))
    assert abs(alarms(tables, seeds)[:, 0].mean() - 0.8) < 0.1


def test_pairing_increases_precision_only_with_shared_seed_effects() -> None:
    rng = np.random.default_rng(0)
    error = {
        tau: np.mean([estimate(*simulate(rng, 12, 3, tau))[0]["row 1"].pooled.size for _ in range(60)])
        for tau in (0, 10)
    }
    assert error[10] < 1.1 * math.sqrt(2 / 3)  # means against means: sqrt(101 * 4 / 9)
    assert error[0] < 1.1 * math.sqrt(4 / 9)  # all runs of the base count


def test_effects_and_standard_errors_are_unbiased() -> None:
    for tau in (0.0, 1.0):
        tables = simulate_tables(1, (3000, 8, 3), tau)
        tables[:, 1] += 2.0
        fit = paired(tables[:, 0, :3], tables[:, 1:, :3], tables[:, 0, 3:])
        effects = fit.effect[:, 0]
        assert abs(effects.mean() - 2.0) < 4 * effects.std() / math.sqrt(3000)
        for size, _ in fit.errors():
            assert math.sqrt((size[:, 0] ** 2).mean()) == pytest.approx(effects.std(), rel=0.1)


def test_the_own_standard_error_is_right_for_a_noisy_row() -> None:
    sd = np.ones(13)
    sd[1] = 4.0
    tables = simulate_tables(2, (3000, 12, 3), 1.0, sd)
    fit = paired(tables[:, 0, :3], tables[:, 1:, :3], tables[:, 0, 3:])
    _, (own, _) = fit.errors()
    for row, true in ((0, fit.effect[:, 0].std()), (1, fit.effect[:, 1].std())):
        assert math.sqrt((own[:, row] ** 2).mean()) == pytest.approx(true, rel=0.15)


def test_paired_estimates_by_hand() -> None:
    """Five rows of two seeds with shared seed effects: the effect is the mean of the paired differences."""
    base = {1: 1.0, 2: 3.0, 3: 2.0, 4: 1.5, 5: 2.5, 6: 2.0}
    shifts = [0.5, 0.6, 0.7, 0.8, 0.9]
    noise = [0.01, -0.02, 0.03, -0.01, 0.02]
    rows = {
        str(i): {1: 1.0 + shift + e, 2: 3.0 + shift - e} for i, (shift, e) in enumerate(zip(shifts, noise, strict=True))
    }
    estimates, spread = estimate(base, rows)
    e = np.array([0.0, *noise])
    residual = 2 * ((e - e.mean()) ** 2).sum() / 5
    assert spread.rest == pytest.approx(math.sqrt(residual))
    assert spread.paired == pytest.approx(1.0, abs=1e-6)
    for i, shift in enumerate(shifts):
        assert estimates[str(i)].effect == pytest.approx(shift, abs=1e-6)
        # The variance against the mean of the others, minus the variance of that mean, but at most reduced to 5/6.
        against = 2 * (6 / 5 * (e[i + 1] - e.mean())) ** 2
        own = max(against - residual / 5, against * 5 / 6)
        of_base = 2 * (6 / 5 * (e[0] - e.mean())) ** 2
        of_base = max(of_base - residual / 5, of_base * 5 / 6)
        assert estimates[str(i)].pooled.size == pytest.approx(math.sqrt((residual + of_base) / 2), rel=0.01)
        assert estimates[str(i)].own.size == pytest.approx(math.sqrt((own + of_base) / 2), rel=0.01)


def test_welch_estimates_by_hand() -> None:
    """One row of three seeds: Welch's t, with the fewest degrees of freedom."""
    base, row = {1: 1.0, 2: 2.0, 3: 3.0, 4: 2.0}, {1: 9.0, 2: 9.5, 3: 10.0}
    estimates, spread = estimate(base, {"a": row})
    result = estimates["a"]
    assert result.effect == pytest.approx(7.5)
    assert result.own.size == pytest.approx(math.sqrt(0.25 / 3 + (2 / 3) / 4))
    assert result.own.freedom == 2
    assert spread.paired is None
    assert result.own.p_value(result.effect) == pytest.approx(2 * stats.t.sf(7.5 / result.own.size, 2))


def test_a_very_noisy_row_is_excluded_from_the_pooled_variance() -> None:
    rng = np.random.default_rng(5)
    base, rows = simulate(rng, 6, 3, 0.0)
    alone, _ = compare(base, rows)
    wild = {"wild": {1: 5.0, 2: 90.0, 3: 400.0}}
    together, _ = compare(base, rows | wild)
    assert not together["wild"].steady
    assert together["wild"].verdict == NONE
    assert together["row 1"].high - together["row 1"].low < 1.3 * (alone["row 1"].high - alone["row 1"].low)


def test_verdicts_agree_with_intervals() -> None:
    rng = np.random.default_rng(7)
    for _ in range(4):
        base, rows = simulate(rng, 8, 3, 1.0)
        rows["good"] = {seed: base[seed] - rng.normal(3.0, 1.0) for seed in (1, 2, 3)}
        rows["bad"] = {seed: base[seed] + rng.normal(60.0, 1.0) for seed in (1, 2, 3)}
        effects, _ = compare(base, rows)
        for effect in effects.values():
            assert (effect.low <= 0 <= effect.high) == (effect.verdict == NONE)
            assert effect.p_value <= effect.adjusted
        assert effects["bad"].verdict == WORSE
        assert effects["good"].verdict in (BETTER, NONE)
        turned, _ = compare(base, rows, lower_is_better=False)
        assert turned["bad"].verdict == BETTER


def test_identical_runs_have_no_difference() -> None:
    base = dict.fromkeys(range(1, 10), 2.0)
    effects, spread = compare(base, {"same": dict.fromkeys((1, 2, 3), 2.0), "other": dict.fromkeys((1, 2, 3), 3.0)})
    assert effects["same"].verdict == NONE
    assert effects["other"].verdict == WORSE
    assert spread.seeds == 0


def at_p(pooled: float, own: float, in_pool: bool = True) -> Estimate:
    """Return an effect of 1 with the p-values `pooled` and `own`."""
    first, second = (Error(1 / critical(p, 1000.0), 1000.0) for p in (pooled, own))
    return Estimate(1.0, first, second, in_pool)


def test_holm_by_hand() -> None:
    """Few rows are tested with their own variances: Holm's example, independent of the pooled variance."""
    adjusted, left = step_down([at_p(0.9, p) for p in (0.01, 0.04, 0.03, 0.005)], Rule(LEVEL))
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert left == [3, 2, 2, 4]
    assert step_down([], Rule(LEVEL)) == ([], [])


def test_many_rows_need_both_variances() -> None:
    rule = Rule(LEVEL)
    others = [at_p(0.9, 0.9)] * 9
    both, only_pooled, only_own = at_p(0.001, 0.009), at_p(0.001, 0.011), at_p(0.006, 0.001)
    for row, expected in ((both, 5 * 0.009), (only_pooled, 5 * 0.011), (only_own, 10 * 0.006)):
        adjusted, left = step_down([*others, row], rule)
        assert adjusted[-1] == pytest.approx(expected)
        assert left[-1] == 10
        half = rule.half(row.pooled, row.own, True, 10)
        assert (half < 1) == (adjusted[-1] <= LEVEL)
    assert step_down([*others, at_p(0.9, 0.004, in_pool=False)], rule)[0][-1] == pytest.approx(10 * 0.004)
    assert rule.confirms == 1 / OWN
    assert Rule(LEVEL, apart=1).p_value(both, 11) == pytest.approx(10 * 0.009)  # one row is set apart: stricter


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(DataError, match="at least 2"):
        estimate({1: 1.0}, {"a": {1: 1.0}})
    with pytest.raises(DataError, match="rows have 1 seed, but a comparison needs at least 2"):
        estimate({1: 1.0, 2: 2.0}, {"a": {1: 1.0}})
    with pytest.raises(DataError, match="rows have different seeds"):
        estimate({1: 1.0, 2: 2.0}, {"a": {1: 1.0}, "b": {1: 1.0, 2: 2.0}})
    assert estimate({1: 1.0, 2: 2.0}, {})[0] == {}


def test_separate_t_tests_with_three_seeds_have_no_power() -> None:
    """The reason for the pooled variance: a separate t test for each of 52 rows."""
    assert critical(0.05 / 52, 2.0) > 32


@pytest.mark.parametrize("df", [1.0, 2.5, 8.0, 40.0, 1000.0])
def test_quadrature_and_critical_values_match_scipy(df: float) -> None:
    for level in (0.05, 0.001):
        assert critical(level, df) == pytest.approx(stats.t.isf(level / 2, df), rel=1e-8)
        assert Error(2.0, df).p_value(2 * critical(level, df)) == pytest.approx(level, rel=1e-9)
    points, weights = _chi_nodes(df, 80)
    for power in (1, 2):
        assert (weights * points**power).sum() == pytest.approx(
            stats.chi.moment(power, df) / df ** (power / 2), rel=1e-4
        )
