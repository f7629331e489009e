"""Batching: group training examples into batches by their lengths.

The plan of an epoch depends only on the lengths of the examples and on a random generator. A plan is a list of
batches, and a batch is a list of rows. A row is one example (padded batches) or several concatenated examples (packed
batches).
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
    """The batches of an epoch. Examples are grouped into batch rows, and batch rows are grouped into batches."""

    examples: np.ndarray  # indices of examples
    rows: np.ndarray  # index in `examples` at which each batch row begins; the last element is the number of examples
    batches: np.ndarray  # index in `rows` at which each batch begins; the last element is the number of rows

    def __len__(self) -> int:
        return len(self.batches) - 1

    def batch(self, number: int) -> list[np.ndarray]:
        """Return the rows of batch `number`, each as an array of example indices."""
        first, last = self.batches[number], self.batches[number + 1]
        return [self.examples[self.rows[row] : self.rows[row + 1]] for row in range(first, last)]


def shuffled(items: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    """Return the items in random order, or in the given order if `rng` is None."""
    return items if rng is None else rng.permutation(items)


class Batching(Spec):
    """Abstract base class of batching specs, which group the examples of an epoch into batches."""

    __slots__ = ()
    packed: ClassVar[bool] = False

    @abstractmethod
    def plan(self, lengths: Mapping[str, np.ndarray], examples: np.ndarray, rng: np.random.Generator | None) -> Plan:
        """Return a plan that groups `examples` into batches.

        `lengths` maps each column of the token table, such as "source", to the number of tokens of every example. The
        examples are shuffled if `rng` is given.
        """

    def shape(self) -> tuple[int, int] | None:
        """Return (rows per batch, tokens per row) if all batches have the same shape, else None."""
        return None


@dataclass(frozen=True, slots=True)
class Buckets(Batching):
    """Padded batches of examples with similar lengths.

    A batch has at most `tokens` source tokens and at most `tokens` target tokens, including padding. The examples of an
    epoch are shuffled, sorted by length (examples of equal length stay shuffled) and divided into batches. Then the
    batches are shuffled.
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
    """Divide examples of ascending lengths into batches with rows * longest <= `tokens`; return the batch offsets."""
    cuts, begin = [0], 0
    while begin < len(ascending):
        # The largest end with (end - begin) * ascending[end - 1] <= tokens; the product increases with end.
        room = min(len(ascending), begin + tokens // max(1, int(ascending[begin])))
        sizes = np.arange(1, room - begin + 1) * ascending[begin:room]
        begin += max(1, int(np.searchsorted(sizes, tokens, side="right")))
        cuts.append(begin)
    return np.asarray(cuts)


class FixedShape(Batching):
    """Base class of batching specs in which every batch has `tokens` / `length` rows of `length` tokens."""

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
        """Divide batch rows into batches in the given order, and return the plan."""
        shape, count = self.shape(), len(rows) - 1
        assert shape is not None, "resolved before planning"
        return Plan(examples, rows, np.append(np.arange(0, count, shape[0]), count))


@dataclass(frozen=True, slots=True)
class Packing(FixedShape):
    """Packed batches: every row has a fixed `length` and holds several examples.

    There is hardly any padding, and every batch has the same shape: `tokens` / `length` rows. The examples of an epoch
    are shuffled and divided into pools of about `pool` examples, or fewer if the corpus is small. Each pool is packed
    by best fit decreasing, from the longest example to the shortest. Each example is put into the row in which it
    leaves the least space, measured in the source or the target, whichever is fuller. Then the rows of all pools are
    shuffled.
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
        """Return the row number of every example. `sizes` are token counts (examples, sides): source and target."""
        count, sides = sizes.shape
        pools = max(1, count // min(self.pool, max(MIN_POOL, count // POOLS_AT_ONCE)))
        each = -(-count // pools)
        whole = np.zeros((pools, each, sides), np.int32)  # the last pool is filled up with size 0
        whole.reshape(-1, sides)[:count] = sizes
        packed = [self._best_fit(whole[first : first + POOLS_AT_ONCE]) for first in range(0, pools, POOLS_AT_ONCE)]
        return (np.concatenate(packed) + each * np.arange(pools)[:, None]).reshape(-1)[:count]

    def _best_fit(self, sizes: np.ndarray) -> np.ndarray:
        """Pack several pools at once. Return the row number of every example in its pool (pools, examples).

        `sizes` are token counts (pools, examples, sides), with one value per side (source, target).
        """
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

    In each epoch, the first window begins at a random offset, and incomplete windows at both ends of the text are
    skipped.
    """

    kind = "windows"
    row = "window"
    tokens: int | None = None
    length: int = 256

    def plan(self, lengths: Mapping[str, np.ndarray], examples: np.ndarray, rng: np.random.Generator | None) -> Plan:
        """Return a plan whose `examples` are the indices of the tokens at which the windows begin."""
        offset = 0 if rng is None else int(rng.integers(self.length))
        starts = shuffled(self.starts(lengths["target"], examples, offset, tails=rng is None), rng)
        return self.in_batches(starts, np.arange(len(starts) + 1))

    def starts(self, lengths: np.ndarray, streams: np.ndarray, offset: int, tails: bool) -> np.ndarray:
        """Return the token indices at which windows begin, for the texts with the indices `streams`.

        The token after the last input of a window must exist, because it is the last label. If `tails` is true, the
        remaining tokens of a text become a shorter window; otherwise they are skipped.
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
