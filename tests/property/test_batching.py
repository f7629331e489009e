"""Batching of random lengths: plans have all examples, keep the limits, and depend only on the seed."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.batching import Batching, Buckets, Packing, Plan, Windows
from regard.errors import DataError

LIMIT = 12
Pairs = list[tuple[int, int]]
pairs = st.lists(st.tuples(st.integers(1, LIMIT), st.integers(1, LIMIT)), min_size=1, max_size=60)
seeds = st.integers(0, 2**32)


def lengths_of(length_pairs: Pairs) -> dict[str, np.ndarray]:
    array = np.asarray(length_pairs)
    return {"source": array[:, 0], "target": array[:, 1]}


def planned(batching: Batching, lengths: dict[str, np.ndarray], seed: int | None, examples: np.ndarray) -> Plan:
    return batching.plan(lengths, examples, None if seed is None else np.random.default_rng(seed))


def batches_of(plan: Plan) -> list[list[list[int]]]:
    return [[row.tolist() for row in plan.batch(number)] for number in range(len(plan))]


def flat(batches: list[list[list[int]]]) -> list[int]:
    return [example for batch in batches for row in batch for example in row]


@given(pairs, seeds | st.none(), st.integers(LIMIT, 5 * LIMIT), st.data())
def test_plans_contain_every_example_as_often_as_given(
    length_pairs: Pairs, seed: int | None, tokens: int, data: st.DataObject
) -> None:
    lengths = lengths_of(length_pairs)
    examples = np.asarray(data.draw(st.lists(st.integers(0, len(length_pairs) - 1), min_size=1, max_size=80)))
    for batching in (Buckets(tokens), Packing(tokens, LIMIT, pool=7)):
        batches = batches_of(planned(batching, lengths, seed, examples))
        assert Counter(flat(batches)) == Counter(examples.tolist())
        assert all(row for batch in batches for row in batch)
        assert all(batches)


@given(pairs, seeds | st.none(), st.integers(LIMIT, 8 * LIMIT))
def test_buckets_respect_the_token_limit_and_group_similar_lengths(
    length_pairs: Pairs, seed: int | None, tokens: int
) -> None:
    lengths, longest = lengths_of(length_pairs), np.max(length_pairs, axis=1)
    batches = batches_of(planned(Buckets(tokens), lengths, seed, np.arange(len(length_pairs))))
    spans = []
    for batch in batches:
        assert all(len(row) == 1 for row in batch)
        batch_lengths = longest[[row[0] for row in batch]]
        assert len(batch_lengths) * batch_lengths.max() <= tokens
        assert (np.diff(batch_lengths) >= 0).all()
        spans.append((int(batch_lengths.min()), int(batch_lengths.max())))
    # Like lengths: the batches, sorted, cover the lengths one after the other.
    spans.sort()
    assert all(high <= low for (_, high), (low, _) in pairwise(spans))


@given(pairs, st.integers(LIMIT, 8 * LIMIT))
def test_unshuffled_buckets_are_maximal(length_pairs: Pairs, tokens: int) -> None:
    longest = np.max(length_pairs, axis=1)
    batches = batches_of(planned(Buckets(tokens), lengths_of(length_pairs), None, np.arange(len(length_pairs))))
    for batch, following in pairwise(batches):
        assert (len(batch) + 1) * longest[following[0][0]] > tokens


@given(pairs, seeds)
def test_order_depends_only_on_the_seed(length_pairs: Pairs, seed: int) -> None:
    lengths, examples = lengths_of(length_pairs), np.arange(len(length_pairs))
    for batching in (Buckets(30), Packing(30, LIMIT, pool=7), Windows(30, 5)):
        streams = {"target": lengths["target"] + 5}
        first, second = (
            batches_of(planned(batching, streams if isinstance(batching, Windows) else lengths, seed, examples))
            for _ in range(2)
        )
        assert first == second


def best_fit_decreasing(sizes: Pairs, length: int, pool: int) -> list[list[int]]:
    """Textbook algorithm, pool by pool: largest example first, each into the bin in which it leaves the least room."""
    pools = max(1, len(sizes) // pool)
    each = -(-len(sizes) // pools)
    closed = []
    for begin in range(0, len(sizes), each):
        bins: list[list[int]] = []
        for example in sorted(range(begin, min(begin + each, len(sizes))), key=lambda n: -sum(sizes[n])):
            left = {
                n: min(length - sum(sizes[member][side] for member in [*members, example]) for side in (0, 1))
                for n, members in enumerate(bins)
            }
            fitting = [n for n, room in left.items() if room >= 0]
            if fitting:
                bins[min(fitting, key=lambda n: left[n])].append(example)
            else:
                bins.append([example])
        closed += [sorted(members) for members in bins]
    return closed


@settings(max_examples=60)
@given(pairs, st.integers(1, 30), st.integers(1, 3))
def test_packing_is_best_fit_decreasing_in_pools(length_pairs: Pairs, pool: int, rows: int) -> None:
    batching = Packing(rows * LIMIT + LIMIT // 2, LIMIT, pool)
    batches = batches_of(planned(batching, lengths_of(length_pairs), None, np.arange(len(length_pairs))))
    assert [row for batch in batches for row in batch] == best_fit_decreasing(length_pairs, LIMIT, pool)
    assert [len(batch) for batch in batches[:-1]] == [rows] * (len(batches) - 1)
    assert 1 <= len(batches[-1]) <= rows


@settings(max_examples=30)
@given(pairs, st.integers(1, 30))
def test_packing_does_not_depend_on_pools_packed_at_once(length_pairs: Pairs, pool: int) -> None:
    results = []
    for together in (1, 3, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("regard.data.batching.POOLS_AT_ONCE", together)
            plan = planned(Packing(3 * LIMIT, LIMIT, pool), lengths_of(length_pairs), 7, np.arange(len(length_pairs)))
        results.append(batches_of(plan))
    assert results[0] == results[1] == results[2]


@given(pairs, seeds)
def test_shuffled_packing_permutes_the_rows_of_the_shuffled_order(length_pairs: Pairs, seed: int) -> None:
    lengths, examples = lengths_of(length_pairs), np.arange(len(length_pairs))
    batching = Packing(3 * LIMIT, LIMIT, pool=20)
    shuffled = np.random.default_rng(seed).permutation(examples)
    in_order = {tuple(row) for batch in batches_of(planned(batching, lengths, None, shuffled)) for row in batch}
    rows = [tuple(row) for batch in batches_of(planned(batching, lengths, seed, examples)) for row in batch]
    assert set(rows) == in_order
    assert len(rows) == len(in_order)


@settings(max_examples=5, deadline=None)
@given(seeds)
def test_rows_of_sentences_are_full(seed: int) -> None:
    # Lengths like those of parliament speech: the target a little longer than the source, both mostly short.
    rng = np.random.default_rng(seed)
    target = np.clip(rng.lognormal(3.3, 0.7, 5000), 2, 256).astype(np.int64)
    source = np.clip(target * rng.normal(0.93, 0.15, 5000), 2, 256).astype(np.int64)
    plan = planned(Packing(4096, 256), {"source": source, "target": target}, seed, np.arange(5000))
    places = (len(plan.rows) - 1) * 256
    assert max(source.sum(), target.sum()) / places > 0.992


@given(pairs, seeds)
def test_packed_rows_respect_the_length_on_both_sides(length_pairs: Pairs, seed: int) -> None:
    lengths = lengths_of(length_pairs)
    batches = batches_of(planned(Packing(3 * LIMIT, LIMIT), lengths, seed, np.arange(len(length_pairs))))
    for batch in batches:
        assert len(batch) <= 3
        for row in batch:
            assert max(lengths["source"][row].sum(), lengths["target"][row].sum()) <= LIMIT


@given(pairs, st.integers(1, LIMIT - 1))
def test_too_long_examples_are_refused(length_pairs: Pairs, most: int) -> None:
    lengths, examples = lengths_of(length_pairs), np.arange(len(length_pairs))
    for batching in (Buckets(most), Packing(2 * most, most)):
        if np.max(length_pairs) > most:
            with pytest.raises(DataError, match="increase it"):
                planned(batching, lengths, 0, examples)
        else:
            planned(batching, lengths, 0, examples)


streams = st.lists(st.integers(0, 60), min_size=1, max_size=4)


@given(streams, seeds, st.integers(1, 9), st.integers(1, 4))
def test_windows_are_disjoint_and_inside_their_texts(
    text_lengths: list[int], seed: int, length: int, rows: int
) -> None:
    lengths, ends = np.asarray(text_lengths), np.cumsum(text_lengths)
    batching = Windows(rows * length + length - 1, length)
    if max(text_lengths) <= length:
        with pytest.raises(DataError, match="choose a shorter length"):
            planned(batching, {"target": lengths}, seed, np.arange(len(lengths)))
        return
    batches = batches_of(planned(batching, {"target": lengths}, seed, np.arange(len(lengths))))
    assert [len(batch) for batch in batches[:-1]] == [rows] * (len(batches) - 1)
    starts = sorted(flat(batches))
    for start in starts:
        stream = int(np.searchsorted(ends, start, side="right"))
        assert ends[stream] - lengths[stream] <= start
        assert start + length + 1 <= ends[stream]  # one token more than is read
    assert all(before + length <= after for before, after in pairwise(starts))


@given(streams, st.integers(1, 9))
def test_evaluation_windows_predict_every_label_once(text_lengths: list[int], length: int) -> None:
    lengths = np.asarray(text_lengths)
    if max(text_lengths) < 2:
        with pytest.raises(DataError, match="choose a shorter length"):
            planned(Windows(length, length), {"target": lengths}, None, np.arange(len(lengths)))
        return
    starts = flat(batches_of(planned(Windows(length, length), {"target": lengths}, None, np.arange(len(lengths)))))
    predicted = []
    begin = 0
    for size in text_lengths:
        window_starts = [start for start in starts if begin <= start < begin + size]
        predicted += [
            at for start in window_starts for at in range(start + 1, min(start + length, begin + size - 1) + 1)
        ]
        begin += size
    begins = np.cumsum([0, *text_lengths])[:-1]
    expected = [begin + at for begin, size in zip(begins, text_lengths, strict=True) for at in range(1, size)]
    assert predicted == expected


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 20))
def test_windows_of_other_epochs_have_other_offsets(seed: int) -> None:
    lengths = {"target": np.asarray([1000])}
    starts = {
        min(flat(batches_of(planned(Windows(64, 64), lengths, seed + epoch, np.arange(1))))) for epoch in range(20)
    }
    assert len(starts) > 5
    assert all(0 <= start < 64 for start in starts)
