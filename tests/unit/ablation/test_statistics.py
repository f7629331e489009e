"""Verdicts: false alarms at most as often as stated, planted effects found as often as stated."""

import math

import numpy as np
import pytest
from scipy import stats

from regard.ablation.distributions import critical, detectable_shift, f_above, power_at, two_sided
from regard.ablation.statistics import BETTER, NONE, WORSE, compare, estimate, holm
from regard.errors import DataError


def draw(rng: np.random.Generator, rows: int, seeds: int, tau: float, planted: float = 0.0) -> tuple[dict, dict]:
    """Losses of a base with 3 x seeds runs and of rows, sigma 1; the first row has the planted effect."""
    y = rng.standard_normal((rows + 1, 3 * seeds)) + tau * rng.standard_normal(3 * seeds) + 5.0
    y[1] += planted
    base = dict(enumerate(y[0].tolist(), 1))
    return base, {f"row {r}": dict(enumerate(y[r, :seeds].tolist(), 1)) for r in range(1, rows + 1)}


def false_alarms(count: int, rows: int, seeds: int, tau: float) -> float:
    """How often any row at all is called better or worse where there is no effect."""
    rng, alarms = np.random.default_rng(rows + 100 * seeds), 0
    for _ in range(count):
        found, _ = estimate(*draw(rng, rows, seeds, tau))
        alarms += min(holm([one.p_value for one in found.values()])[0]) <= 0.05
    return alarms / count


@pytest.mark.parametrize("tau", [0.0, 1.0, 5.0])
@pytest.mark.parametrize(("rows", "seeds"), [(1, 3), (4, 2), (10, 3)])
def test_false_alarms_are_at_most_5_percent_over_all_rows(rows: int, seeds: int, tau: float) -> None:
    count = 1000
    assert false_alarms(count, rows, seeds, tau) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / count)


@pytest.mark.parametrize("tau", [0.0, 2.0])
def test_an_effect_of_the_stated_size_is_found_with_the_stated_power(tau: float) -> None:
    rng = np.random.default_rng(3)
    stated = [compare(*draw(rng, 12, 3, tau))[0]["row 2"].detectable for _ in range(25)]
    effect, found, count = float(np.median(stated)), 0, 500
    for _ in range(count):
        estimates, _ = estimate(*draw(rng, 12, 3, tau, planted=-effect))
        adjusted, _ = holm([one.p_value for one in estimates.values()])
        found += adjusted[0] <= 0.05 and estimates["row 1"].effect < 0
    assert abs(found / count - 0.8) < 0.06


def test_pairing_helps_where_seeds_do_the_same_to_all_rows_and_does_no_harm_where_not() -> None:
    rng = np.random.default_rng(0)
    error = {tau: np.mean([estimate(*draw(rng, 12, 3, tau))[0]["row 1"].error for _ in range(60)]) for tau in (0, 10)}
    assert error[10] < 1.1 * math.sqrt(2 / 3)  # means against means: sqrt(101 * 4 / 9)
    assert error[0] < 1.1 * math.sqrt(4 / 9)  # all runs of the base count


def test_effects_are_unbiased_with_the_error_that_is_stated() -> None:
    rng = np.random.default_rng(1)
    for tau in (0.0, 1.0):
        found = [estimate(*draw(rng, 8, 3, tau, planted=2.0))[0]["row 1"] for _ in range(800)]
        effects = np.array([one.effect for one in found])
        assert abs(effects.mean() - 2.0) < 4 * effects.std() / math.sqrt(800)
        assert effects.std() == pytest.approx(math.sqrt(np.mean([one.error**2 for one in found])), rel=0.1)


def test_by_hand() -> None:
    """Five rows of two seeds that a seed shifts alike: the effect is the mean of the paired differences."""
    base = {1: 1.0, 2: 3.0, 3: 2.0, 4: 1.5, 5: 2.5, 6: 2.0}
    shifts = [0.5, 0.6, 0.7, 0.8, 0.9]
    noise = [0.01, -0.02, 0.03, -0.01, 0.02]
    rows = {
        str(i): {1: 1.0 + shift + e, 2: 3.0 + shift - e} for i, (shift, e) in enumerate(zip(shifts, noise, strict=True))
    }
    found, spread = estimate(base, rows)
    e = np.array([0.0, *noise])
    residual = 2 * ((e - e.mean()) ** 2).sum() / 5
    assert spread.rest == pytest.approx(math.sqrt(residual))
    assert spread.paired == pytest.approx(1.0, abs=1e-6)
    for i, shift in enumerate(shifts):
        assert found[str(i)].effect == pytest.approx(shift, abs=1e-6)
        assert found[str(i)].error == pytest.approx(math.sqrt(residual), rel=0.01)
        assert found[str(i)].freedom == pytest.approx(5, rel=0.01)


def test_one_seed_is_judged_by_the_spread_of_the_base() -> None:
    base = {1: 1.0, 2: 2.0, 3: 3.0}
    found, spread = estimate(base, {"a": {1: 9.0}})
    assert found["a"].effect == pytest.approx(7.0)
    assert found["a"].error == pytest.approx(math.sqrt(4 / 3))
    assert found["a"].freedom == 2
    assert spread.paired is None


def test_a_row_that_varies_wildly_is_judged_by_its_own_variance_and_blurs_no_other() -> None:
    rng = np.random.default_rng(5)
    base, rows = draw(rng, 6, 3, 0.0)
    alone, _ = compare(base, rows)
    wild = {"wild": {1: 5.0, 2: 90.0, 3: 400.0}}
    together, _ = compare(base, rows | wild)
    assert not together["wild"].steady
    assert together["wild"].verdict == NONE
    assert together["row 1"].high - together["row 1"].low < 1.3 * (alone["row 1"].high - alone["row 1"].low)


def test_verdicts_agree_with_intervals() -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        base, rows = draw(rng, 8, 3, 1.0)
        rows["good"] = {seed: base[seed] - rng.normal(3.0, 1.0) for seed in (1, 2, 3)}
        rows["bad"] = {seed: base[seed] + rng.normal(9.0, 1.0) for seed in (1, 2, 3)}
        effects, _ = compare(base, rows)
        for one in effects.values():
            assert (one.low <= 0 <= one.high) == (one.verdict == NONE)
            assert one.p_value <= one.adjusted
        assert effects["bad"].verdict == WORSE
        assert effects["good"].verdict in (BETTER, NONE)
        turned, _ = compare(base, rows, lower_is_better=False)
        assert turned["bad"].verdict == BETTER


def test_identical_runs_are_no_difference() -> None:
    base = dict.fromkeys(range(1, 10), 2.0)
    effects, spread = compare(base, {"same": dict.fromkeys((1, 2, 3), 2.0), "other": dict.fromkeys((1, 2, 3), 3.0)})
    assert effects["same"].verdict == NONE
    assert effects["other"].verdict == WORSE
    assert spread.seeds == 0


def test_holm_by_hand() -> None:
    adjusted, levels = holm([0.01, 0.04, 0.03, 0.005])
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert levels == pytest.approx([0.05 / 3, 0.05 / 2, 0.05 / 2, 0.05 / 4])
    assert holm([]) == ([], [])


def test_what_cannot_be_compared_is_said() -> None:
    with pytest.raises(DataError, match="at least 2"):
        estimate({1: 1.0}, {"a": {1: 1.0}})
    with pytest.raises(DataError, match="same seeds"):
        estimate({1: 1.0, 2: 2.0}, {"a": {1: 1.0}, "b": {1: 1.0, 2: 2.0}})
    assert estimate({1: 1.0, 2: 2.0}, {})[0] == {}


def test_three_seeds_alone_could_never_decide() -> None:
    """Why variance is pooled: a t test of its own for each of 52 rows."""
    assert critical(0.05 / 52, 2.0) > 32


@pytest.mark.parametrize("df", [1.0, 2.5, 8.0, 40.0, 1000.0])
def test_distributions_are_those_of_scipy(df: float) -> None:
    for t in (0.0, 0.3, 2.0, 9.0):
        assert two_sided(t, df) == pytest.approx(2 * stats.t.sf(t, df), abs=1e-12)
        assert f_above(t, 2.0, df) == pytest.approx(stats.f.sf(t, 2, df), abs=1e-12)
    for level in (0.05, 0.001):
        assert critical(level, df) == pytest.approx(stats.t.isf(level / 2, df), rel=1e-8)
    if df >= 8:
        expected = stats.nct.sf(2.5, df, 3.0) + stats.nct.cdf(-2.5, df, 3.0)
        assert power_at(3.0, 2.5, df) == pytest.approx(expected, abs=1e-8)


def test_a_detectable_effect_is_found_with_its_power() -> None:
    shift = detectable_shift(0.01, 12.0, 0.8)
    assert power_at(shift, critical(0.01, 12.0), 12.0) == pytest.approx(0.8, abs=1e-9)
