"""The length limit that is fitted to the training text, for any lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from regard.decoding.length_limit import MORE, SHARE, SLACK, LengthLimit, fit, widest

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 200)), min_size=1, max_size=80)
LIMIT = st.builds(LengthLimit, st.floats(0, 9, allow_subnormal=False), st.integers(0, 60), st.integers(0, 300))


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array(pairs)
    return lengths[:, 0], lengths[:, 1]


@given(LENGTHS, st.integers(1, 30))
def test_fitted_line_covers_its_share_of_the_pairs(pairs: list[tuple[int, int]], times: int) -> None:
    source, target = columns(pairs * times)
    limit = fit(source, target)
    covered = target <= limit.slope * source + limit.constant + 1e-9
    assert covered.sum() >= SHARE * len(source)
    assert limit.longest == target.max()


@given(LENGTHS)
def test_fitted_limit_is_below_constant_and_ratio_limits(pairs: list[tuple[int, int]]) -> None:
    """Of fewer than 1,000 pairs all must be covered."""
    source, target = columns(pairs)
    limit = fit(source, target)
    mean = limit.slope * source.mean() + limit.constant
    assert mean <= target.max() + 1e-9
    assert mean <= (target / source).max() * source.mean() + 0.001 * source.mean() + 1 + 1e-9  # rounded up


@given(LENGTHS)
def test_every_training_target_is_within_the_limit(pairs: list[tuple[int, int]]) -> None:
    source, target = columns(pairs)
    limit = fit(source, target)
    assert all(limit.most(int(s)) >= t + MORE for s, t in zip(source, target, strict=True))
    assert max(limit.most(int(s)) for s in source) <= SLACK * target.max() + MORE + 1


@given(st.lists(LIMIT, min_size=1, max_size=4), st.integers(0, 300))
def test_widest_limit_bounds_every_limit(limits: list[LengthLimit], source: int) -> None:
    widest_limit = widest(limits)
    assert widest_limit is not None
    assert all(widest_limit.most(source) >= limit.most(source) for limit in limits)
    assert widest([*limits, None]) is None
