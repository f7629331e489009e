"""Loading: equal batches for equal seed, epoch and position; weights of corpora; background threads."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.data.batching import Batching, Buckets, Packing, Plan, Windows
from regard.data.loader import BatchLoader, Examples, Place, Prefetch
from regard.data.objectives import Item, LanguageModelling, Translation
from regard.data.token_store import Table, Writer
from regard.errors import DataError

Values = tuple[Any, ...]


def values(item: Item) -> Values:
    """All values of an item, as lists that can be compared."""
    batch = item.batch
    names = ("target", "labels", "target_seg", "source", "source_seg", "target_pos", "source_pos")
    tensors = (getattr(batch, name) for name in names)
    lists = [None if tensor is None else tensor.tolist() for tensor in tensors]
    return (*lists, batch.packed, batch.segments, batch.longest, item.labels, item.places, item.padding)


def pairs_table(count: int, first: int = 0) -> Table:
    """Example n repeats the token n + 10 a random number of times."""
    rng = np.random.default_rng(first + 1)
    texts = [[[n + 10] * int(rng.integers(1, 9)) for _ in range(2)] for n in range(first, first + count)]
    return Table.of(source=[[*s, 2] for s, _ in texts], target=[[1, *t, 2] for _, t in texts])


def on_disk(folder: Path, table: Table, vocab: int = 300) -> Table:
    writer = Writer(folder, tuple(table.columns), vocab)
    writer.add(table)
    return writer.close()


def text_table(count: int, first: int = 0) -> Table:
    return Table.of(target=[list(range(first, first + count))])


def translating(batching: Batching, seed: int = 3, tables: list[Table] | None = None, **weights: Any) -> BatchLoader:
    tables = tables or [pairs_table(40)]
    return BatchLoader(Examples(tables, weights.get("weights", [1.0] * len(tables)), Translation()), batching, seed)


def reading(seed: int = 3, sizes: tuple[int, ...] = (200,), weights: tuple[float, ...] = (1.0,)) -> BatchLoader:
    tables = [text_table(size, 1000 * n) for n, size in enumerate(sizes)]
    return BatchLoader(Examples(tables, weights, LanguageModelling()), Windows(20, 5), seed)


def example_counts(loader: BatchLoader, epoch: int) -> Counter[int]:
    """How often each example occurs in an epoch, identified by its token."""
    counts: Counter[int] = Counter()
    plan = loader.plan(epoch)
    for position in range(len(plan)):
        item = loader.item(plan, position)
        labels = item.batch.labels
        assert labels is not None
        assert item.batch.target_seg is not None
        starts = (labels > 2) & (item.batch.target == 1) & (item.batch.target_seg > 0)
        counts.update((labels[starts] - 10).tolist())
    return counts


MAKERS = {
    "buckets": lambda seed=3: translating(Buckets(40), seed),
    "packing": lambda seed=3: translating(Packing(60, 20), seed),
    "windows": lambda seed=3: reading(seed),
}


@pytest.mark.parametrize("name", MAKERS)
def test_batch_depends_only_on_seed_epoch_and_position(name: str) -> None:
    make = MAKERS[name]
    first, second = make(), make()
    for epoch in (2, 0, 1):  # in any order
        plan = second.plan(epoch)
        for position in reversed(range(len(plan))):
            assert values(second.item(plan, position)) == values(first.item(first.plan(epoch), position))


@pytest.mark.parametrize("name", MAKERS)
def test_other_seeds_and_epochs_give_other_batches(name: str) -> None:
    make = MAKERS[name]
    loader = make()
    orders = [[values(loader.item(loader.plan(epoch), p)) for p in range(3)] for epoch in range(3)]
    orders += [[values(s.item(s.plan(0), p)) for p in range(3)] for s in (make(4), make(-3), make(2**63 - 1))]
    assert all(a != b for n, a in enumerate(orders) for b in orders[:n])


@pytest.mark.parametrize("seed", [-1, -(2**63)])
def test_seed_may_be_any_64_bit_integer(seed: int) -> None:
    assert len(translating(Buckets(40), seed).plan(0)) > 0


@pytest.mark.parametrize("name", MAKERS)
def test_loading_resumes_from_any_position(name: str) -> None:
    make = MAKERS[name]
    length = len(make().plan(0))
    straight = list(islice(make().after(Place()), 2 * length + 3))
    assert {place.epoch for _, place in straight} >= {0, 1, 2}
    for at in (0, 1, length - 2, length - 1, length, length + 1):
        following = straight[at][1]
        resumed = islice(make().after(following), len(straight) - at - 1)
        for (item, place), (expected, expected_place) in zip(resumed, straight[at + 1 :], strict=True):
            assert values(item) == values(expected)
            assert place == expected_place


def test_positions_count_batches_and_epochs() -> None:
    loader = translating(Buckets(40))
    length = len(loader.plan(0))
    places = [place for _, place in islice(loader.after(Place()), length + 1)]
    assert places[: length - 1] == [Place(0, n) for n in range(1, length)]
    assert places[length - 1 :] == [Place(1, 0), Place(1, 1)]


@pytest.mark.parametrize("batching", [Buckets(40), Packing(60, 20)])
def test_epoch_contains_every_example_once(batching: Batching) -> None:
    loader = translating(batching)
    for epoch in range(3):
        assert example_counts(loader, epoch) == Counter(range(40))


def test_evaluation_reads_every_example_once_in_order_of_length() -> None:
    loader = translating(Buckets(40))
    items = list(loader.once())
    assert sum(item.labels for item in items) == int((loader.examples.lengths["target"] - 1).sum())
    widths = [max(item.batch.target.shape[1] + 1, item.batch.source.shape[1]) for item in items]  # type: ignore[union-attr]
    assert widths == sorted(widths)
    assert [values(item) for item in loader.once()] == [values(item) for item in items]


@pytest.mark.parametrize("batching", [Buckets(40), Packing(60, 20)])
def test_weight_sets_how_often_a_corpus_is_repeated(batching: Batching) -> None:
    tables = [pairs_table(20), pairs_table(30, 20), pairs_table(10, 50)]
    loader = translating(batching, tables=tables, weights=[2.0, 0.3, 1.5])
    parts = []
    for epoch in range(4):
        counts = example_counts(loader, epoch)
        assert {counts[n] for n in range(20)} == {2}
        part = sorted(n for n in range(20, 50) if counts[n])
        assert len(part) == 9
        assert {counts[n] for n in part} == {1}
        assert Counter(counts[n] for n in range(50, 60)) == {1: 5, 2: 5}
        assert sum(counts.values()) == 40 + 9 + 15
        parts.append(tuple(part))
    assert len(set(parts)) == 4  # another part every time


def test_weights_are_ignored_in_evaluation() -> None:
    tables = [pairs_table(5), pairs_table(5, 5)]
    examples = Examples(tables, [3.0, 0.2], Translation())
    assert examples.epoch(None).tolist() == list(range(10))


def test_small_weight_draws_at_least_one_example() -> None:
    examples = Examples([pairs_table(5), pairs_table(5, 5)], [1.0, 0.01], Translation())
    assert len(examples.epoch(np.random.default_rng(0))) == 6


def test_tables_on_disk_are_concatenated(tmp_path: Path) -> None:
    memory = [pairs_table(7), pairs_table(9, 7), Table.of(source=[], target=[]), pairs_table(4, 16)]
    disk = [on_disk(tmp_path / str(n), table, 2**17 if n == 1 else 300) for n, table in enumerate(memory)]
    spread = Examples(disk, [1.0] * 4, Translation())
    whole = Examples([pairs_of(memory)], [1.0], Translation())
    assert (spread.count, spread.sizes) == (20, [7, 9, 0, 4])
    for name in ("source", "target"):
        assert spread.lengths[name].tolist() == whole.lengths[name].tolist()
        assert [spread.columns[name][n].tolist() for n in range(20)] == [
            whole.columns[name][n].tolist() for n in range(20)
        ]
    for batching in (Buckets(40), Packing(60, 20)):
        first, second = BatchLoader(spread, batching, 5), BatchLoader(whole, batching, 5)
        both = zip(islice(first.after(Place()), 9), islice(second.after(Place()), 9), strict=True)
        assert all(values(a[0]) == values(b[0]) and a[1] == b[1] for a, b in both)


def pairs_of(tables: list[Table]) -> Table:
    return Table.of(
        **{
            name: [table[name][row].tolist() for table in tables for row in range(table.rows)]
            for name in ("source", "target")
        }
    )


def test_windows_are_consecutive_tokens() -> None:
    loader = reading(sizes=(103,))
    offsets = set()
    for epoch in range(6):
        plan, predicted = loader.plan(epoch), []
        for position in range(len(plan)):
            item = loader.item(plan, position)
            assert item.batch.labels is not None
            assert item.batch.target.shape[1] == 5
            assert item.padding == 0
            assert (item.batch.labels == item.batch.target + 1).all()
            predicted += item.batch.labels.flatten().tolist()
        first = min(predicted)
        assert sorted(predicted) == list(range(first, first + len(predicted)))  # consecutive, none twice
        offsets.add(first - 1)
    assert len(offsets) > 2


def test_windows_of_an_evaluation_predict_every_token_but_the_first() -> None:
    loader = reading(sizes=(23, 1, 7), weights=(1.0, 1.0, 1.0))
    predicted, labels = [], 0
    for item in loader.once():
        batch = item.batch
        assert batch.labels is not None
        real = batch.labels[batch.target_seg > 0] if batch.target_seg is not None else batch.labels
        predicted += real.flatten().tolist()
        labels += item.labels
        assert item.labels == real.numel() == item.places - item.padding
    assert sorted(predicted) == [*range(1, 23), *range(2001, 2007)]
    assert labels == len(predicted)


def test_windows_end_at_the_end_of_a_text() -> None:
    loader = reading(sizes=(23, 41, 7), weights=(1.0, 1.0, 1.0))
    for item, _ in islice(loader.after(Place()), 40):
        assert item.batch.labels is not None
        assert (item.batch.labels == item.batch.target + 1).all()


def test_text_shorter_than_one_batch_is_refused() -> None:
    with pytest.raises(DataError, match="give more text"):
        translating(Buckets(40), tables=[Table.of(source=[], target=[])]).plan(0)


# -- planning ahead


@pytest.mark.parametrize("name", MAKERS)
def test_plan_computed_ahead_is_the_same(name: str) -> None:
    make = MAKERS[name]
    ahead, direct = make(), make()
    for epoch in (3, 4, 1):  # also an epoch that is planned twice, or not in order
        ahead.plan_ahead(epoch)
        ahead.plan_ahead(epoch)
        actual, expected = ahead.plan(epoch), direct.plan(epoch)
        assert actual.examples.tolist() == expected.examples.tolist()
        assert (actual.rows.tolist(), actual.batches.tolist()) == (expected.rows.tolist(), expected.batches.tolist())
    ahead.plan_ahead(9)
    assert ahead.plan(2).examples.tolist() == direct.plan(2).examples.tolist()


def test_the_next_epoch_is_planned_from_the_middle_of_an_epoch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, plan = [], Buckets.plan

    def recording_plan(*arguments: Any) -> Plan:
        threads.append(threading.current_thread().name)
        return plan(*arguments)

    monkeypatch.setattr(Buckets, "plan", recording_plan)
    loader = translating(Buckets(40))
    main_thread, size = threading.current_thread().name, len(loader.plan(0))
    batches = loader.after(Place())
    for _ in range(size // 2):
        next(batches)
    assert threads == [main_thread]
    for _ in range(size // 2 + 2):
        next(batches)
    assert threads[:2] == [main_thread, "plan of epoch 1"]
    assert main_thread not in threads[1:]
    assert loader.plan(2)  # begun with the first batch of epoch 1
    assert threads == [main_thread, "plan of epoch 1", "plan of epoch 2"]


def test_error_in_a_background_plan_is_raised_by_plan() -> None:
    loader = translating(Buckets(40), tables=[Table.of(source=[], target=[])])
    loader.plan_ahead(1)
    with pytest.raises(DataError, match="give more text"):
        loader.plan(1)


# -- prefetching


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ahead", [1, 8])
def test_prefetching_yields_the_same_batches(name: str, ahead: int) -> None:
    make = MAKERS[name]
    place = Place(1, 2)
    prefetch = Prefetch(make(), place, ahead=ahead)
    for item, following in islice(make().after(place), 25):
        prefetched, prefetched_place = prefetch.next()
        assert prefetched is not None
        assert values(prefetched) == values(item)
        assert prefetched_place == following
    prefetch.close()


def test_batches_are_pinned_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    monkeypatch.setattr("regard.batch.Batch.pinned", lambda self: pinned.append(self) or self)
    prefetch = Prefetch(MAKERS["buckets"](), Place(), pinned=True)
    item, _ = prefetch.next()
    prefetch.close()
    assert pinned
    assert item is not None
    assert pinned[0] is item.batch


class Broken(BatchLoader):
    """A loader that fails after two batches."""

    def after(self, place: Place) -> Iterator[tuple[Item, Place]]:
        yield from islice(super().after(place), 2)
        raise DataError("the disk is gone")


def test_error_in_the_prefetch_thread_is_raised_by_next() -> None:
    loader = MAKERS["buckets"]()
    prefetch = Prefetch(Broken(loader.examples, loader.batching, loader.seed), Place())
    item, _ = prefetch.next()
    assert item is not None
    assert values(item) == values(loader.item(loader.plan(0), 0))
    prefetch.next()
    with pytest.raises(DataError, match="the disk is gone"):
        prefetch.next()
    with pytest.raises(DataError, match="the disk is gone"):  # and again, rather than wait for ever
        prefetch.next()
    prefetch.close()


def ended(before: int) -> bool:
    for _ in range(50):
        if threading.active_count() == before:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("read", [0, 3])
def test_closing_ends_the_thread(read: int) -> None:
    before = threading.active_count()
    prefetch = Prefetch(MAKERS["buckets"](), Place(), ahead=2)
    for _ in range(read):
        prefetch.next()
    time.sleep(0.05)  # long enough to fill the queue, so that the thread waits
    assert threading.active_count() == before + 1
    prefetch.close()
    assert ended(before)


def test_failed_prefetch_thread_can_be_closed() -> None:
    before = threading.active_count()
    loader = MAKERS["buckets"]()
    prefetch = Prefetch(Broken(loader.examples, loader.batching, loader.seed), Place(), ahead=2)
    time.sleep(0.05)
    prefetch.close()
    assert ended(before)


def test_packed_batches_of_all_epochs_have_the_same_limits() -> None:
    """Except for the last batch of an epoch, which may have fewer rows. One captured step can run them all."""
    loader = translating(Packing(60, 20))
    assert loader.one_shape
    batches = [
        loader.item(loader.plan(epoch), p).batch for epoch in range(3) for p in range(len(loader.plan(epoch)) - 1)
    ]
    assert len(batches) > 5
    assert all(batch.alike(batches[0]) for batch in batches)
    longest = max(int(lengths.max()) for lengths in loader.examples.packed_lengths.values())
    assert batches[0].longest == longest
    assert all(int(batch.target_seg.max()) <= batch.segments for batch in batches if batch.target_seg is not None)
    assert not translating(Buckets(40)).one_shape


def test_packed_row_has_no_room_for_unread_tokens() -> None:
    """bos t1 .. tn eos takes n + 1 positions of the inputs and of the labels, not n + 2."""
    table = Table.of(source=[[7] * 4 + [2]] * 6, target=[[1, *[8] * 4, 2]] * 6)
    loader = BatchLoader(Examples([table], [1.0], Translation()), Packing(10, 10), seed=1)
    assert len(loader.plan(0)) == 3
    assert [loader.item(loader.plan(0), p).padding for p in range(3)] == [0, 0, 0]
