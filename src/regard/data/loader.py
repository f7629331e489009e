"""Load batches in a background thread. Batch n of an epoch depends only on the seed, the epoch and n."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from regard.data.batching import Batching, Plan, Windows
from regard.data.objectives import Item, Objective, Packed
from regard.data.token_store import Column, Ids, Table
from regard.errors import DataError

Own = Callable[[int], bool]  # (number of a batch) -> whether this process trains on it


@dataclass(frozen=True, slots=True)
class Place:
    """A point in the sequence of training batches: the next batch is number `position` of epoch `epoch`."""

    epoch: int = 0
    position: int = 0


class Examples:
    """The training examples: concatenated token tables of several corpora, and the sampling weight of each corpus."""

    def __init__(self, tables: Sequence[Table], weights: Sequence[float], objective: Objective) -> None:
        self.objective = objective
        self.sizes = [table.rows for table in tables]
        self.weights = list(weights)
        self.columns = {name: _joined([table[name] for table in tables]) for name in objective.columns}
        self.lengths = {name: self.columns[name].lengths for name in objective.measured}
        # Number of tokens of each example in a packed row, without the final tokens that the model does not read.
        self.packed_lengths = {name: lengths - objective.unread.get(name, 0) for name, lengths in self.lengths.items()}
        self.count = sum(self.sizes)

    def epoch(self, rng: np.random.Generator | None) -> np.ndarray:
        """Return the indices of the examples of an epoch. If `rng` is None, every index occurs once.

        A corpus of weight 2 occurs twice in an epoch. If the weight is 0.3, an epoch has 30 % of the corpus, drawn at
        random for every epoch.
        """
        if rng is None:
            return np.arange(self.count)
        chosen, first = [], 0
        for size, weight in zip(self.sizes, self.weights, strict=True):
            whole, part = divmod(weight, 1)
            own = np.arange(first, first + size)
            chosen += [own] * int(whole)
            if part:
                chosen.append(rng.permutation(own)[: max(1, round(part * size))])
            first += size
        return np.concatenate(chosen)


def _joined(columns: list[Column]) -> Column:
    if len(columns) == 1:
        return columns[0]
    starts = np.cumsum([0, *(len(column.ids) for column in columns)])
    offsets = [column.offsets[1:] + start for column, start in zip(columns, starts[:-1], strict=True)]
    return Column(_ConcatenatedIds([column.ids for column in columns], starts), np.concatenate([[0], *offsets]))


class _ConcatenatedIds:
    """Several memory-mapped arrays, indexed as one array. Values are read from disk only when they are indexed."""

    def __init__(self, parts: list[Ids], starts: np.ndarray) -> None:
        self.parts, self.starts = parts, starts

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, at: np.ndarray | slice, /) -> np.ndarray:
        if isinstance(at, slice):
            at = np.arange(*at.indices(len(self)))
        part = np.searchsorted(self.starts, at, side="right") - 1
        first = np.asarray(self.parts[0][:0])  # for the shape and type of a value
        values = np.zeros((*at.shape, *first.shape[1:]), first.dtype if first.ndim > 1 else np.uint32)
        for number in np.unique(part).tolist():
            selected = part == number
            values[selected] = self.parts[number][at[selected] - self.starts[number]]
        return values


class BatchLoader:
    """Loads the training batches of consecutive epochs."""

    def __init__(self, examples: Examples, batching: Batching, seed: int) -> None:
        self.examples, self.batching, self.seed = examples, batching, seed
        self.packed = self._packed_sizes() if examples.count else None
        self._plan: tuple[int, Plan] | None = None
        self._ahead: tuple[int, Future[Plan]] | None = None

    def plan(self, epoch: int) -> Plan:
        """Return the batches of an epoch. For given examples, the plan depends only on the seed and the epoch."""
        if self._plan is None or self._plan[0] != epoch:
            if self._ahead is not None and self._ahead[0] == epoch:
                self._plan, self._ahead = (epoch, self._ahead[1].result()), None
            else:
                self._plan = epoch, self._compute_plan(epoch)
        return self._plan[1]

    def plan_ahead(self, epoch: int) -> None:
        """Compute the plan of an epoch in a background thread, so that a later call of `plan` returns at once."""
        if self._ahead is not None and self._ahead[0] == epoch:
            return
        future: Future[Plan] = Future()

        def work() -> None:
            try:
                future.set_result(self._compute_plan(epoch))
            except BaseException as error:  # raised by `plan`
                future.set_exception(error)

        self._ahead = epoch, future
        threading.Thread(target=work, name=f"plan of epoch {epoch}", daemon=True).start()

    def _compute_plan(self, epoch: int) -> Plan:
        return self._plan_of(np.random.default_rng([self.seed % 2**64, epoch]))

    @property
    def one_shape(self) -> bool:
        """True if all batches have the same shape, except that the last batch of an epoch may have fewer rows."""
        return self.batching.shape() is not None

    def _packed_sizes(self) -> Packed | None:
        """Return the shape and the size limits that all packed batches share, or None if batches are not packed."""
        shape = self.batching.shape()
        if not self.batching.packed or shape is None:
            return None
        by_column = self.examples.packed_lengths.values()
        longest = max(int(lengths.max()) for lengths in by_column)
        segments = min(shape[1] // max(1, int(lengths.min())) for lengths in by_column)
        return Packed(*shape, longest, max(1, segments))

    def _plan_of(self, rng: np.random.Generator | None) -> Plan:
        lengths = self.examples.packed_lengths if self.batching.packed else self.examples.lengths
        plan = self.batching.plan(lengths, self.examples.epoch(rng), rng)
        if not len(plan):
            raise DataError("the training text is too short for one batch; give more text")
        return plan

    def item(self, plan: Plan, position: int) -> Item:
        """Return batch number `position` of a plan."""
        columns, rows = self.examples.columns, plan.batch(position)
        if isinstance(self.batching, Windows):
            columns, rows = _windows(columns["target"], np.concatenate(rows), self.batching.length)
        return self.examples.objective.item(columns, rows, self.packed)

    def once(self) -> Iterator[Item]:
        """Yield batches that contain every example once, for evaluation."""
        plan = self._plan_of(None)
        yield from (self.item(plan, position) for position in range(len(plan)))

    def after(self, place: Place) -> Iterator[tuple[Item, Place]]:
        """Yield batches endlessly, beginning with the batch at `place`, each with the place of the batch that follows.

        The plan of the next epoch is computed in the background. In the first epoch, this starts only in the middle of
        the epoch, because short training may never need a second epoch.
        """
        for plan, position, following in self._positions(place):
            yield self.item(plan, position), following

    def own_after(self, place: Place, own: Own) -> Iterator[tuple[Item | None, Place]]:
        """Yield the batches of `after`. The n-th batch is None if `own(n)` is false: another process trains on it."""
        for number, (plan, position, following) in enumerate(self._positions(place)):
            yield self.item(plan, position) if own(number) else None, following

    def _positions(self, place: Place) -> Iterator[tuple[Plan, int, Place]]:
        """Yield endlessly, from the batch at `place` on: the plan, the position in it, and the place that follows."""
        while True:
            plan = self.plan(place.epoch)
            for position in range(place.position, len(plan)):
                if place.epoch or position >= len(plan) // 2:
                    self.plan_ahead(place.epoch + 1)
                following = Place(place.epoch, position + 1) if position + 1 < len(plan) else Place(place.epoch + 1)
                yield plan, position, following
            place = Place(place.epoch + 1)


def _windows(stream: Column, starts: np.ndarray, length: int) -> tuple[dict[str, Column], list[np.ndarray]]:
    """Return columns and rows for windows of a text. Each window is an example of `length` + 1 tokens in its own row.

    A window at the end of the text may be shorter.
    """
    ends = np.minimum(starts + length + 1, stream.offsets[np.searchsorted(stream.offsets, starts, side="right")])
    return {"target": stream.spans(starts, ends)}, list(np.arange(len(starts))[:, None])


class Prefetch:
    """Prepares batches in a background thread, and in pinned memory if `pinned` is true, for faster copies to a GPU."""

    def __init__(
        self, stream: BatchLoader, place: Place, pinned: bool = False, ahead: int = 8, own: Own | None = None
    ) -> None:
        self._queue: queue.Queue[tuple[Item | None, Place] | BaseException] = queue.Queue(ahead)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(stream, place, pinned, own), daemon=True)
        self._thread.start()

    def _work(self, stream: BatchLoader, place: Place, pinned: bool, own: Own | None) -> None:
        try:
            for item, following in stream.after(place) if own is None else stream.own_after(place, own):
                ready = replace(item, batch=item.batch.pinned()) if pinned and item is not None else item
                if not self._put((ready, following)):
                    return
        except BaseException as error:  # raised by `next`
            self._put(error)

    def _put(self, entry: tuple[Item | None, Place] | BaseException) -> bool:
        while not self._done.is_set():
            try:
                self._queue.put(entry, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False

    def next(self) -> tuple[Item | None, Place]:
        """Return the next batch, or None if another process trains on it, and the `Place` of the batch that follows."""
        entry = self._queue.get()
        if isinstance(entry, BaseException):
            self._queue.put(entry)  # the thread has ended, so the next call raises again
            raise entry
        return entry

    def close(self) -> None:
        """Stop the background thread and wait until it has ended."""
        self._done.set()
        with suppress(queue.Empty):  # unblock a thread that waits for space
            while True:
                self._queue.get_nowait()
        self._thread.join()
