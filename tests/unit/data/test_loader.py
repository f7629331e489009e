"""Streams: the same batches for the same seed, epoch and position, wherever one begins; corpora by weight; threads."""

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
    """All of an item, to be compared."""
    batch = item.batch
    names = ("target", "labels", "target_seg", "source", "source_seg", "target_pos", "source_pos")
    tensors = (getattr(batch, name) for name in names)
    found = [None if tensor is None else tensor.tolist() for tensor in tensors]
    return (*found, batch.packed, batch.segments, batch.longest, item.labels, item.places, item.padding)


def pairs_table(count: int, first: int = 0) -> Table:
    """Example n says n + 10, and is of a length of its own."""
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


def seen(stream: BatchLoader, epoch: int) -> Counter[int]:
    """How often each example of an epoch is seen, by what it says."""
    counts: Counter[int] = Counter()
    plan = stream.plan(epoch)
    for position in range(len(plan)):
        item = stream.item(plan, position)
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
    one, other = make(), make()
    for epoch in (2, 0, 1):  # in any order
        plan = other.plan(epoch)
        for position in reversed(range(len(plan))):
            assert values(other.item(plan, position)) == values(one.item(one.plan(epoch), position))


@pytest.mark.parametrize("name", MAKERS)
def test_other_seeds_and_epochs_give_other_batches(name: str) -> None:
    make = MAKERS[name]
    stream = make()
    orders = [[values(stream.item(stream.plan(epoch), p)) for p in range(3)] for epoch in range(3)]
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
        for (item, place), (wanted, wanted_place) in zip(resumed, straight[at + 1 :], strict=True):
            assert values(item) == values(wanted)
            assert place == wanted_place


def test_positions_count_batches_and_epochs() -> None:
    stream = translating(Buckets(40))
    length = len(stream.plan(0))
    places = [place for _, place in islice(stream.after(Place()), length + 1)]
    assert places[: length - 1] == [Place(0, n) for n in range(1, length)]
    assert places[length - 1 :] == [Place(1, 0), Place(1, 1)]


@pytest.mark.parametrize("batching", [Buckets(40), Packing(60, 20)])
def test_epoch_contains_every_example_once(batching: Batching) -> None:
    stream = translating(batching)
    for epoch in range(3):
        assert seen(stream, epoch) == Counter(range(40))


def test_evaluation_reads_every_example_once_in_order_of_length() -> None:
    stream = translating(Buckets(40))
    items = list(stream.once())
    assert sum(item.labels for item in items) == int((stream.examples.lengths["target"] - 1).sum())
    widths = [max(item.batch.target.shape[1] + 1, item.batch.source.shape[1]) for item in items]  # type: ignore[union-attr]
    assert widths == sorted(widths)
    assert [values(item) for item in stream.once()] == [values(item) for item in items]


@pytest.mark.parametrize("batching", [Buckets(40), Packing(60, 20)])
def test_weight_sets_how_often_a_corpus_is_repeated(batching: Batching) -> None:
    tables = [pairs_table(20), pairs_table(30, 20), pairs_table(10, 50)]
    stream = translating(batching, tables=tables, weights=[2.0, 0.3, 1.5])
    parts = []
    for epoch in range(4):
        counts = seen(stream, epoch)
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
        one, other = BatchLoader(spread, batching, 5), BatchLoader(whole, batching, 5)
        both = zip(islice(one.after(Place()), 9), islice(other.after(Place()), 9), strict=True)
        assert all(values(a[0]) == values(b[0]) and a[1] == b[1] for a, b in both)


def pairs_of(tables: list[Table]) -> Table:
    return Table.of(
        **{
            name: [table[name][row].tolist() for table in tables for row in range(table.rows)]
            for name in ("source", "target")
        }
    )


def test_windows_are_consecutive_tokens() -> None:
    stream = reading(sizes=(103,))
    offsets = set()
    for epoch in range(6):
        plan, said = stream.plan(epoch), []
        for position in range(len(plan)):
            item = stream.item(plan, position)
            assert item.batch.labels is not None
            assert item.batch.target.shape[1] == 5
            assert item.padding == 0
            assert (item.batch.labels == item.batch.target + 1).all()
            said += item.batch.labels.flatten().tolist()
        assert sorted(said) == list(range(min(said), min(said) + len(said)))  # one after the other, none twice
        offsets.add(min(said) - 1)
    assert len(offsets) > 2


def test_windows_of_an_evaluation_predict_every_token_but_the_first() -> None:
    stream = reading(sizes=(23, 1, 7), weights=(1.0, 1.0, 1.0))
    said, labels = [], 0
    for item in stream.once():
        batch = item.batch
        assert batch.labels is not None
        real = batch.labels[batch.target_seg > 0] if batch.target_seg is not None else batch.labels
        said += real.flatten().tolist()
        labels += item.labels
        assert item.labels == real.numel() == item.places - item.padding
    assert sorted(said) == [*range(1, 23), *range(2001, 2007)]
    assert labels == len(said)


def test_windows_end_at_the_end_of_a_text() -> None:
    stream = reading(sizes=(23, 41, 7), weights=(1.0, 1.0, 1.0))
    for item, _ in islice(stream.after(Place()), 40):
        assert item.batch.labels is not None
        assert (item.batch.labels == item.batch.target + 1).all()


def test_text_shorter_than_one_batch_is_refused() -> None:
    with pytest.raises(DataError, match="give more text"):
        translating(Buckets(40), tables=[Table.of(source=[], target=[])]).plan(0)


# -- planning ahead


@pytest.mark.parametrize("name", MAKERS)
def test_plan_computed_ahead_is_the_same(name: str) -> None:
    make = MAKERS[name]
    ahead, alone = make(), make()
    for epoch in (3, 4, 1):  # also one that is asked for twice, or not the one that was begun
        ahead.plan_ahead(epoch)
        ahead.plan_ahead(epoch)
        found, wanted = ahead.plan(epoch), alone.plan(epoch)
        assert found.examples.tolist() == wanted.examples.tolist()
        assert (found.rows.tolist(), found.batches.tolist()) == (wanted.rows.tolist(), wanted.batches.tolist())
    ahead.plan_ahead(9)
    assert ahead.plan(2).examples.tolist() == alone.plan(2).examples.tolist()


def test_the_next_epoch_is_planned_from_the_middle_of_an_epoch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, plan = [], Buckets.plan

    def noted(*given: Any) -> Plan:
        threads.append(threading.current_thread().name)
        return plan(*given)

    monkeypatch.setattr(Buckets, "plan", noted)
    stream = translating(Buckets(40))
    here, size = threading.current_thread().name, len(stream.plan(0))
    batches = stream.after(Place())
    for _ in range(size // 2):
        next(batches)
    assert threads == [here]
    for _ in range(size // 2 + 2):
        next(batches)
    assert threads[:2] == [here, "plan of epoch 1"]
    assert here not in threads[1:]
    assert stream.plan(2)  # begun with the first batch of epoch 1
    assert threads == [here, "plan of epoch 1", "plan of epoch 2"]


def test_error_in_a_background_plan_is_raised_by_plan() -> None:
    stream = translating(Buckets(40), tables=[Table.of(source=[], target=[])])
    stream.plan_ahead(1)
    with pytest.raises(DataError, match="give more text"):
        stream.plan(1)


# -- prefetching


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ahead", [1, 8])
def test_prefetching_yields_the_same_batches(name: str, ahead: int) -> None:
    make = MAKERS[name]
    place = Place(1, 2)
    prefetch = Prefetch(make(), place, ahead=ahead)
    for item, following in islice(make().after(place), 25):
        found, found_place = prefetch.next()
        assert values(found) == values(item)
        assert found_place == following
    prefetch.close()


def test_batches_are_pinned_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    monkeypatch.setattr("regard.batch.Batch.pinned", lambda self: pinned.append(self) or self)
    prefetch = Prefetch(MAKERS["buckets"](), Place(), pinned=True)
    item, _ = prefetch.next()
    prefetch.close()
    assert pinned
    assert pinned[0] is item.batch


class Broken(BatchLoader):
    """A stream that fails after a while."""

    def after(self, place: Place) -> Iterator[tuple[Item, Place]]:
        yield from islice(super().after(place), 2)
        raise DataError("the disk is gone")


def test_error_in_the_prefetch_thread_is_raised_by_next() -> None:
    good = MAKERS["buckets"]()
    prefetch = Prefetch(Broken(good.examples, good.batching, good.seed), Place())
    assert values(prefetch.next()[0]) == values(good.item(good.plan(0), 0))
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
    time.sleep(0.05)  # long enough to fill the queue: the thread waits for somebody to read
    assert threading.active_count() == before + 1
    prefetch.close()
    assert ended(before)


def test_failed_prefetch_thread_can_be_closed() -> None:
    before = threading.active_count()
    good = MAKERS["buckets"]()
    prefetch = Prefetch(Broken(good.examples, good.batching, good.seed), Place(), ahead=2)
    time.sleep(0.05)
    prefetch.close()
    assert ended(before)


def test_packed_batches_of_all_epochs_have_the_same_limits() -> None:
    """But for the last of an epoch, which may be short of rows: a captured step fits them all."""
    stream = translating(Packing(60, 20))
    assert stream.one_shape
    whole = [stream.item(stream.plan(epoch), p).batch for epoch in range(3) for p in range(len(stream.plan(epoch)) - 1)]
    assert len(whole) > 5
    assert all(batch.alike(whole[0]) for batch in whole)
    longest = max(int(lengths.max()) for lengths in stream.examples.packed_lengths.values())
    assert whole[0].longest == longest
    assert all(int(batch.target_seg.max()) <= batch.segments for batch in whole if batch.target_seg is not None)
    assert not translating(Buckets(40)).one_shape


def test_packed_row_has_no_room_for_unread_tokens() -> None:
    """bos t1 .. tn eos takes n + 1 places on either side of the model, not n + 2."""
    table = Table.of(source=[[7] * 4 + [2]] * 6, target=[[1, *[8] * 4, 2]] * 6)
    stream = BatchLoader(Examples([table], [1.0], Translation()), Packing(10, 10), seed=1)
    assert len(stream.plan(0)) == 3
    assert [stream.item(stream.plan(0), p).padding for p in range(3)] == [0, 0, 0]
