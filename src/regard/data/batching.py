"""The Batching slot: the specs that group examples into batches.

The plan for an epoch depends only on the lengths of the examples and on a random generator. A plan is a list of
batches, a batch is a list of rows, and a row is a list of concatenated examples. Padded batches have one example per
row.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from regard.errors import DataError, SpecError
from regard.tree import Spec

POOLS_AT_ONCE = 64  # number of pools packed in parallel, in arrays that fit in a processor's cache
MIN_POOL = 1024  # minimum number of examples in a pool; small corpora get small pools, so that many run in parallel


@dataclass(frozen=True)
class Plan:
    """The ordered examples of an epoch, divided into rows and batches."""

    examples: np.ndarray  # indices of examples
    rows: np.ndarray  # offsets of rows in `examples`; the last offset is the end
    batches: np.ndarray  # offsets of batches in `rows`; the last offset is the end

    def __len__(self) -> int:
        return len(self.batches) - 1

    def batch(self, number: int) -> list[np.ndarray]:
        """Return the rows of a batch. Each row is an array of example indices."""
        first, last = self.batches[number], self.batches[number + 1]
        return [self.examples[self.rows[row] : self.rows[row + 1]] for row in range(first, last)]


def shuffled(items: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    """Return the items in random order, or in the given order if `rng` is None."""
    return items if rng is None else rng.permutation(items)


class Batching(Spec):
    """The Batching slot: a spec that groups the examples of an epoch into batches."""

    __slots__ = ()
    packed: ClassVar[bool] = False

    @abstractmethod
    def plan(self, lengths: Mapping[str, np.ndarray], examples: np.ndarray, rng: np.random.Generator | None) -> Plan:
        """Return a plan that groups `examples` into batches.

        `lengths` maps each column to the number of tokens per example. The examples are shuffled unless `rng` is None.
        """

    def shape(self) -> tuple[int, int] | None:
        """Return the number of rows and the width if all batches have the same shape, else None."""
        return None


@dataclass(frozen=True, slots=True)
class Buckets(Batching):
    """Batches of examples with similar lengths.

    In each batch, neither the source nor the target has more than `tokens` tokens, including padding. The epoch is
    shuffled, sorted by length (examples of equal length stay shuffled) and divided into batches. The batches are then
    shuffled.
    """

    kind = "buckets"
    tokens: int | None = None  # None: chosen from the corpus

    def check(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise SpecError("tokens", f"must be at least 1, not {self.tokens}")

    def plan(self, lengths: Mapping[str, np.ndarray], examples: np.ndarray, rng: np.random.Generator | None) -> Plan:
        assert self.tokens is not None, "resolved before planning"
        order = shuffled(examples, rng)
        columns = [lengths[name][order] for name in lengths]
        longest = np.maximum.reduce(columns)
        if len(order) and (most := int(longest.max())) > self.tokens:
            raise DataError(
                f"data.batching.tokens: {self.tokens} is less than the longest example, {most} tokens; increase it"
            )
        by_length = np.lexsort((*columns, longest))  # stable, so ties stay shuffled; the last key is primary
        order, longest = order[by_length], longest[by_length]
        cuts = _cuts(longest, self.tokens)
        batches = shuffled(np.arange(len(cuts) - 1), rng)
        sizes = np.diff(cuts)[batches]
        examples = np.concatenate([order[cuts[n] : cuts[n + 1]] for n in batches]) if len(order) else order
        return Plan(examples, np.arange(len(examples) + 1), np.concatenate([[0], np.cumsum(sizes)]))


def _cuts(ascending: np.ndarray, tokens: int) -> np.ndarray:
    """Return the batch offsets, for lengths in ascending order, such that rows * longest <= `tokens` in each batch."""
    cuts, begin = [0], 0
    while begin < len(ascending):
        # The largest end with (end - begin) * ascending[end - 1] <= tokens; the product increases with end.
        room = min(len(ascending), begin + tokens // max(1, int(ascending[begin])))
        sizes = np.arange(1, room - begin + 1) * ascending[begin:room]
        begin += max(1, int(np.searchsorted(sizes, tokens, side="right")))
        cuts.append(begin)
    return np.asarray(cuts)


class FixedShape(Batching):
    """Base class of batchings whose batches have `tokens` / `length` rows of `length` tokens."""

    __slots__ = ()
    row: ClassVar[str]  # what a row is called in an error message
    tokens: int | None
    length: int

    def check(self) -> None:
        if self.length < 1:
            raise SpecError("length", f"must be at least 1, not {self.length}")
        if self.tokens is not None and self.tokens < self.length:
            raise SpecError(
                "tokens", f"is {self.tokens}, less than one {self.row} of length {self.length}; increase it"
            )

    def shape(self) -> tuple[int, int] | None:
        return None if self.tokens is None else (self.tokens // self.length, self.length)

    def in_batches(self, examples: np.ndarray, rows: np.ndarray) -> Plan:
        """Return the plan with the given rows, divided into batches in order."""
        shape, count = self.shape(), len(rows) - 1
        assert shape is not None, "resolved before planning"
        return Plan(examples, rows, np.append(np.arange(0, count, shape[0]), count))


@dataclass(frozen=True, slots=True)
class Packing(FixedShape):
    """Batches whose rows have a fixed `length` and hold several examples each.

    There is hardly any padding, and every batch has the same shape: `tokens` / `length` rows. The shuffled epoch is
    divided into pools of about `pool` examples, or fewer if the corpus is small. Best fit decreasing packs each pool:
    the examples are taken from the longest to the shortest, and each is put into the row that it leaves with the least
    space in the source or the target, whichever is fuller. The rows of all pools are then shuffled.
    """

    kind = "packing"
    packed = True
    row = "row"
    tokens: int | None = None
    length: int = 512
    pool: int = 4096  # maximum number of examples packed together; a larger pool needs less padding and more time

    def check(self) -> None:
        FixedShape.check(self)
        if self.pool < 1:
            raise SpecError("pool", f"must be at least 1, not {self.pool}")

    def plan(self, lengths: Mapping[str, np.ndarray], examples: np.ndarray, rng: np.random.Generator | None) -> Plan:
        order = shuffled(examples, rng)
        columns = np.stack([lengths[name][order] for name in lengths], 1)
        if len(order) and int(columns.max()) > self.length:
            raise DataError(
                f"data.batching.length: an example of {int(columns.max())} tokens does not fit in a row of "
                f"{self.length}; increase it"
            )
        _, row, sizes = np.unique(self._rows(columns), return_inverse=True, return_counts=True)
        place = np.empty_like(sizes)
        place[shuffled(np.arange(len(sizes)), rng)] = np.arange(len(sizes))  # new index of each row
        by_row = np.argsort(place[row], kind="stable")
        sizes[place] = sizes.copy()
        return self.in_batches(order[by_row], np.concatenate([[0], np.cumsum(sizes)]))

    def _rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return the row number of every example. `sizes` has the shape (examples, columns)."""
        count, sides = sizes.shape
        pools = max(1, count // min(self.pool, max(MIN_POOL, count // POOLS_AT_ONCE)))
        each = -(-count // pools)
        whole = np.zeros((pools, each, sides), np.int32)  # the last pool is filled up with size 0
        whole.reshape(-1, sides)[:count] = sizes
        packed = [self._best_fit(whole[first : first + POOLS_AT_ONCE]) for first in range(0, pools, POOLS_AT_ONCE)]
        return (np.concatenate(packed) + each * np.arange(pools)[:, None]).reshape(-1)[:count]

    def _best_fit(self, sizes: np.ndarray) -> np.ndarray:
        """Return row numbers (pools, examples) for `sizes` (pools, examples, columns). Pools are packed in parallel."""
        pools, count, sides = sizes.shape
        decreasing = np.argsort(-sizes.sum(2), axis=1, kind="stable")
        in_order = np.take_along_axis(sizes, decreasing[:, :, None], 1).transpose(1, 2, 0).copy()
        room = np.full((sides, pools, count), self.length, np.int32)
        flat, first = room.reshape(sides, -1), np.arange(pools) * count
        rows = np.empty((count, pools), np.int64)
        opened = 1  # number of rows that are used in some pool, plus one that is empty in every pool
        for row, size in zip(rows, in_order, strict=True):
            left = (room[:, :, :opened] - size[:, :, None]).min(0)
            # Negative values do not fit; as unsigned integers they are large.
            left.view(np.uint32).argmin(1, out=row)
            flat[:, first + row] -= size
            opened = min(count, max(opened, int(row.max()) + 2))
        assigned = np.empty((pools, count), np.int64)
        np.put_along_axis(assigned, decreasing, rows.T, 1)
        return assigned


@dataclass(frozen=True, slots=True)
class Windows(FixedShape):
    """Batches of windows of `length` tokens from one long text, with `tokens` / `length` windows per batch.

    In each epoch the first window begins at a random offset, and the incomplete windows at both ends are skipped.
    """

    kind = "windows"
    row = "window"
    tokens: int | None = None
    length: int = 256

    def plan(self, lengths: Mapping[str, np.ndarray], examples: np.ndarray, rng: np.random.Generator | None) -> Plan:
        """Return a plan whose `examples` are the indices at which the windows begin."""
        offset = 0 if rng is None else int(rng.integers(self.length))
        starts = shuffled(self.starts(lengths["target"], examples, offset, tails=rng is None), rng)
        return self.in_batches(starts, np.arange(len(starts) + 1))

    def starts(self, lengths: np.ndarray, streams: np.ndarray, offset: int, tails: bool) -> np.ndarray:
        """Return the indices at which the windows of the given texts begin.

        A window needs one more token after its last input, as the last label. The remainder of a text becomes a shorter
        window if `tails` is true and is skipped otherwise.
        """
        ends, last = np.cumsum(lengths), 1 if tails else self.length
        begins = ends - lengths + offset
        spans = zip(begins[streams].tolist(), ends[streams].tolist(), strict=True)
        parts = [np.arange(begin, end - last, self.length) for begin, end in spans]
        starts = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if len(starts):
            return starts
        if offset:
            return self.starts(lengths, streams, 0, tails)
        raise DataError(
            f"data.batching.length: a text of {int(lengths.sum())} tokens has no window of {self.length}; "
            "choose a shorter length"
        )
