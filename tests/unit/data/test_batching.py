"""Batching of a few known lengths, against plans computed by hand."""

import numpy as np
import pytest

from regard.data.batching import Batching, Buckets, Packing, Plan, Windows, shuffled
from regard.errors import DataError, SpecError


def batches_of(plan: Plan) -> list[list[list[int]]]:
    return [[row.tolist() for row in plan.batch(number)] for number in range(len(plan))]


def test_plan_batches_are_lists_of_rows() -> None:
    plan = Plan(np.asarray([7, 3, 5, 9, 1]), np.asarray([0, 2, 3, 5]), np.asarray([0, 1, 3]))
    assert len(plan) == 2
    assert batches_of(plan) == [[[7, 3]], [[5], [9, 1]]]


def test_order_is_kept_without_a_generator() -> None:
    items = np.arange(50)
    assert shuffled(items, None) is items
    assert sorted(shuffled(items, np.random.default_rng(1)).tolist()) == items.tolist()
    assert shuffled(items, np.random.default_rng(1)).tolist() != items.tolist()


def test_buckets_count_padding_on_the_longer_side() -> None:
    lengths = {"source": np.asarray([2, 6, 1, 3, 9]), "target": np.asarray([5, 2, 1, 3, 4])}
    plan = Buckets(10).plan(lengths, np.arange(5), None)
    # Longest sides 5, 6, 1, 3, 9 in order: 1 3 | 5 | 6 | 9; 2 x 3 fits ten, 3 x 5 and 2 x 6 do not.
    assert batches_of(plan) == [[[2], [3]], [[0]], [[1]], [[4]]]
    assert batches_of(Buckets(12).plan(lengths, np.arange(5), None)) == [[[2], [3]], [[0], [1]], [[4]]]


def test_buckets_sort_equal_lengths_by_the_other_side() -> None:
    lengths = {"source": np.asarray([5, 5, 5, 5]), "target": np.asarray([4, 1, 3, 2])}
    assert batches_of(Buckets(10).plan(lengths, np.arange(4), None)) == [[[1], [3]], [[2], [0]]]


def test_buckets_shuffle_ties_and_batches() -> None:
    lengths = {"target": np.repeat([3, 4, 5, 6], 30)}
    plans = [Buckets(60).plan(lengths, np.arange(120), np.random.default_rng(seed)) for seed in range(6)]
    together = {tuple(sorted(example for (example,) in batch)) for plan in plans for batch in batches_of(plan)}
    assert len(together) > 2 * len(plans[0])  # batches have other examples
    orders = {tuple(int(lengths["target"][batch[0][0]]) for batch in batches_of(plan)) for plan in plans}
    assert len(orders) > 1  # and the lengths come in another order


def test_example_may_fill_a_batch_but_not_exceed_it() -> None:
    lengths = {"target": np.asarray([8, 8, 1])}
    assert batches_of(Buckets(8).plan(lengths, np.arange(3), None)) == [[[2]], [[0]], [[1]]]
    with pytest.raises(DataError, match=r"tokens: 7 is less than the longest example, 8 tokens; increase it"):
        Buckets(7).plan(lengths, np.arange(3), None)
    # Only the given examples have to fit.
    assert batches_of(Buckets(7).plan(lengths, np.asarray([2]), None)) == [[[2]]]


@pytest.mark.parametrize("batching", [Buckets(8), Packing(8, 8)])
def test_no_examples_give_no_batches(batching: Batching) -> None:
    assert len(batching.plan({"target": np.zeros(0, np.int64)}, np.arange(0), np.random.default_rng(0))) == 0


def test_packing_is_best_fit_decreasing_on_the_fuller_side() -> None:
    lengths = {"source": np.asarray([1, 6, 3, 6, 4]), "target": np.asarray([1, 2, 6, 2, 2])}
    # Sums 2, 8, 9, 8, 6. First 2 (room 7, 4); 1 fits beside it (room 1, 2); 3 opens a row (4, 8); 4 fits there (0, 6);
    # 0 fits the first only (0, 1).
    assert batches_of(Packing(20, 10).plan(lengths, np.arange(5), None)) == [[[0, 1, 2], [3, 4]]]
    lengths["target"] = np.asarray([1, 2, 6, 2, 3])
    lengths["source"] = np.asarray([1, 5, 3, 6, 5])
    # Sums 2, 7, 9, 8, 8. First 2 (7, 4); 3 beside it (1, 2); 4 opens a row (5, 7); 1 fits there (0, 5). For 0 there is
    # room in the first row only.
    assert batches_of(Packing(20, 10).plan(lengths, np.arange(5), None)) == [[[0, 2, 3], [1, 4]]]


def test_packing_packs_each_pool_separately() -> None:
    lengths = {"target": np.asarray([9, 7, 8, 2, 3, 1])}
    assert batches_of(Packing(30, 10).plan(lengths, np.arange(6), None)) == [[[0, 5], [2, 3], [1, 4]]]
    # Two pools of three: examples of the second do not fill gaps of the first.
    assert batches_of(Packing(30, 10, pool=3).plan(lengths, np.arange(6), None)) == [[[0], [2], [1]], [[3, 4, 5]]]


def test_packing_has_a_fixed_shape() -> None:
    assert Packing(1000, 64).shape() == (15, 64)
    assert Windows(1000, 64).shape() == (15, 64)
    assert Packing().shape() is None
    assert Windows().shape() is None
    assert Buckets(1000).shape() is None
    assert (Packing.packed, Buckets.packed, Windows.packed) == (True, False, False)


def test_packing_refuses_examples_longer_than_a_row() -> None:
    with pytest.raises(DataError, match=r"data\.batching\.length: an example of 11 tokens does not fit in a row of 10"):
        Packing(10, 10).plan({"a": np.asarray([3]), "b": np.asarray([11])}, np.arange(1), None)


def test_windows_of_a_small_text() -> None:
    lengths = {"target": np.asarray([9, 2, 6])}
    windows = Windows(8, 4)
    assert windows.starts(lengths["target"], np.arange(3), 0, tails=False).tolist() == [0, 4, 11]
    assert windows.starts(lengths["target"], np.arange(3), 0, tails=True).tolist() == [0, 4, 9, 11, 15]
    assert windows.starts(lengths["target"], np.arange(3), 1, tails=False).tolist() == [1, 12]
    assert windows.starts(lengths["target"], np.asarray([2]), 1, tails=False).tolist() == [12]
    assert batches_of(windows.plan(lengths, np.arange(3), None)) == [[[0], [4]], [[9], [11]], [[15]]]


def test_text_of_one_window_gives_the_same_batch_in_every_epoch() -> None:
    lengths = {"target": np.asarray([5])}
    for seed in range(8):
        assert batches_of(Windows(4, 4).plan(lengths, np.arange(1), np.random.default_rng(seed))) == [[[0]]]
    with pytest.raises(DataError, match="a text of 4 tokens has no window of 4; choose a shorter length"):
        Windows(4, 4).plan({"target": np.asarray([4])}, np.arange(1), np.random.default_rng(0))


def test_windows_are_shuffled() -> None:
    lengths = {"target": np.asarray([400])}
    starts = Windows(8, 4).plan(lengths, np.arange(1), np.random.default_rng(0)).examples.tolist()
    assert starts != sorted(starts)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Buckets(0), "tokens"),
        (lambda: Packing(10, 11), "tokens"),
        (lambda: Packing(length=0), "length"),
        (lambda: Packing(pool=0), "pool"),
        (lambda: Windows(10, 11), "tokens"),
        (lambda: Windows(length=0), "length"),
    ],
)
def test_too_small_sizes_are_refused(make: object, path: str) -> None:
    with pytest.raises(SpecError) as raised:
        make()  # type: ignore[operator]
    assert raised.value.path == path
