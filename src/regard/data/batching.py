"""Batching slot: which examples stand together. A plan of an epoch is a pure function of the lengths and a generator.

Every plan is a list of batches, a batch a list of rows, a row a list of examples laid end to end: a padded batch is a
packed one with one example a row.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from regard.errors import DataError, SpecError
from regard.tree import Spec

SIDE_BY_SIDE = 64  # pools that are packed at once: what they need stays in a processor's cache
SMALLEST_POOL = 1024  # of a small corpus, whose pools are smaller so that many are packed at once


@dataclass(frozen=True)
class Plan:
    """Examples in order, cut into rows, cut into batches."""

    examples: np.ndarray  # numbers of examples
    rows: np.ndarray  # where rows begin in `examples`, and its end
    batches: np.ndarray  # where batches begin in `rows`, and its end

    def __len__(self) -> int:
        return len(self.batches) - 1

    def batch(self, number: int) -> list[np.ndarray]:
        """The rows of a batch, each an array of examples."""
        first, last = self.batches[number], self.batches[number + 1]
        return [self.examples[self.rows[row] : self.rows[row + 1]] for row in range(first, last)]


def shuffled(items: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    """The items in an order drawn from `rng`, or as they are."""
    return items if rng is None else rng.permutation(items)


class Batching(Spec):
    """Slot: how the examples of an epoch are put together."""

    __slots__ = ()
    packed: ClassVar[bool] = False

    @abstractmethod
    def plan(self, lengths: Mapping[str, np.ndarray], examples: np.ndarray, rng: np.random.Generator | None) -> Plan:
        """The batches of `examples`, whose lengths stand in `lengths` by column; shuffled by `rng`, if there is one."""

    def shape(self) -> tuple[int, int] | None:
        """Rows and width of every batch, where they are always the same."""
        return None


@dataclass(frozen=True, slots=True)
class Buckets(Batching):
    """Examples of like length together: at most `tokens` tokens a batch, counted with padding on the longer side.

    The epoch is shuffled, sorted by length (ties stay shuffled), cut, and the batches are shuffled.
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
            raise DataError(f"data.batching.tokens: {self.tokens} tokens do not hold an example of {most}; allow more")
        by_length = np.lexsort((*columns, longest))  # stable, so that ties stay shuffled; the last key is the first
        order, longest = order[by_length], longest[by_length]
        cuts = _cuts(longest, self.tokens)
        batches = shuffled(np.arange(len(cuts) - 1), rng)
        sizes = np.diff(cuts)[batches]
        examples = np.concatenate([order[cuts[n] : cuts[n + 1]] for n in batches]) if len(order) else order
        return Plan(examples, np.arange(len(examples) + 1), np.concatenate([[0], np.cumsum(sizes)]))


def _cuts(ascending: np.ndarray, tokens: int) -> np.ndarray:
    """Where batches begin so that rows x longest stays within `tokens`; lengths ascend, so the last is the longest."""
    cuts, begin = [0], 0
    while begin < len(ascending):
        # The largest end with (end - begin) * ascending[end - 1] <= tokens; the product ascends with end.
        room = min(len(ascending), begin + tokens // max(1, int(ascending[begin])))
        sizes = np.arange(1, room - begin + 1) * ascending[begin:room]
        begin += max(1, int(np.searchsorted(sizes, tokens, side="right")))
        cuts.append(begin)
    return np.asarray(cuts)


@dataclass(frozen=True, slots=True)
class Packing(Batching):
    """Several examples a row, rows of one fixed `length`: hardly any padding, and every batch has the same shape.

    Each batch holds `tokens` / `length` rows. The epoch is shuffled and cut into pools of about `pool` examples, fewer
    if the corpus is small; in a pool the longest example comes first, and each goes to the row that it leaves the least
    room in on its fuller side (best fit decreasing). Short examples come last and fill the gaps. The rows of all pools
    are shuffled.
    """

    kind = "packing"
    packed = True
    tokens: int | None = None
    length: int = 512
    pool: int = 4096  # at most so many examples are fitted together: more leave fewer gaps, and take longer

    def check(self) -> None:
        for name in ("length", "pool"):
            if getattr(self, name) < 1:
                raise SpecError(name, f"must be at least 1, not {getattr(self, name)}")
        if self.tokens is not None and self.tokens < self.length:
            raise SpecError("tokens", f"{self.tokens} tokens do not hold a row of length {self.length}")

    def shape(self) -> tuple[int, int] | None:
        return None if self.tokens is None else (self.tokens // self.length, self.length)

    def plan(self, lengths: Mapping[str, np.ndarray], examples: np.ndarray, rng: np.random.Generator | None) -> Plan:
        shape = self.shape()
        assert shape is not None, "resolved before planning"
        order = shuffled(examples, rng)
        columns = np.stack([lengths[name][order] for name in lengths], 1)
        if len(order) and int(columns.max()) > self.length:
            raise DataError(
                f"data.batching.length: an example of {int(columns.max())} tokens does not fit a row of {self.length}; "
                "allow more"
            )
        _, row, sizes = np.unique(self._rows(columns), return_inverse=True, return_counts=True)
        place = np.empty_like(sizes)
        place[shuffled(np.arange(len(sizes)), rng)] = np.arange(len(sizes))  # where each row comes to stand
        by_row = np.argsort(place[row], kind="stable")
        sizes[place] = sizes.copy()
        begin = np.concatenate([[0], np.cumsum(sizes)])
        return Plan(order[by_row], begin, np.append(np.arange(0, len(sizes), shape[0]), len(sizes)))

    def _rows(self, sizes: np.ndarray) -> np.ndarray:
        """The number of the row that each example goes to; `sizes` is (examples, sides)."""
        count, sides = sizes.shape
        pools = max(1, count // min(self.pool, max(SMALLEST_POOL, count // SIDE_BY_SIDE)))
        each = -(-count // pools)
        whole = np.zeros((pools, each, sides), np.int32)  # what is missing in the last pool has no size and comes last
        whole.reshape(-1, sides)[:count] = sizes
        found = [self._best_fit(whole[first : first + SIDE_BY_SIDE]) for first in range(0, pools, SIDE_BY_SIDE)]
        return (np.concatenate(found) + each * np.arange(pools)[:, None]).reshape(-1)[:count]

    def _best_fit(self, sizes: np.ndarray) -> np.ndarray:
        """Best fit decreasing in each of several pools, side by side: (pools, examples, sides) to (pools, examples).

        What is decided for one pool is independent of the others; together they are arrays instead of loops.
        """
        pools, count, sides = sizes.shape
        decreasing = np.argsort(-sizes.sum(2), axis=1, kind="stable")
        in_order = np.take_along_axis(sizes, decreasing[:, :, None], 1).transpose(1, 2, 0).copy()
        room = np.full((sides, pools, count), self.length, np.int32)
        flat, first = room.reshape(sides, -1), np.arange(pools) * count
        rows = np.empty((count, pools), np.int64)
        opened = 1  # of these rows the last is empty in every pool
        for row, size in zip(rows, in_order, strict=True):
            left = (room[:, :, :opened] - size[:, :, None]).min(0)
            # What is below 0 does not fit, and is a large number without its sign.
            left.view(np.uint32).argmin(1, out=row)
            flat[:, first + row] -= size
            opened = min(count, max(opened, int(row.max()) + 2))
        found = np.empty((pools, count), np.int64)
        np.put_along_axis(found, decreasing, rows.T, 1)
        return found


@dataclass(frozen=True, slots=True)
class Windows(Batching):
    """A text as one stream, cut into windows of `length` tokens, `tokens` / `length` of them a batch.

    Each epoch cuts at another offset, so that windows differ; what is left at both ends is not used in that epoch.
    """

    kind = "windows"
    tokens: int | None = None
    length: int = 256

    def check(self) -> None:
        if self.length < 1:
            raise SpecError("length", f"must be at least 1, not {self.length}")
        if self.tokens is not None and self.tokens < self.length:
            raise SpecError("tokens", f"{self.tokens} tokens do not hold a window of length {self.length}")

    def shape(self) -> tuple[int, int] | None:
        return None if self.tokens is None else (self.tokens // self.length, self.length)

    def plan(self, lengths: Mapping[str, np.ndarray], examples: np.ndarray, rng: np.random.Generator | None) -> Plan:
        """An example is here the token at which a window begins, in a stream of `lengths["target"].sum()` tokens."""
        shape = self.shape()
        assert shape is not None, "resolved before planning"
        offset = 0 if rng is None else int(rng.integers(self.length))
        starts = shuffled(self.starts(lengths["target"], examples, offset, tails=rng is None), rng)
        return Plan(
            starts,
            np.arange(len(starts) + 1),
            np.append(np.arange(0, len(starts), shape[0]), len(starts)),
        )

    def starts(self, lengths: np.ndarray, streams: np.ndarray, offset: int, tails: bool) -> np.ndarray:
        """Where the windows of the given streams begin; a window needs one token more than it reads.

        What is left at the end of a stream is a shorter window if `tails`, and not used otherwise.
        """
        ends = np.cumsum(lengths).tolist()
        last = 1 if tails else self.length
        found = [
            np.arange(ends[stream] - int(lengths[stream]) + offset, ends[stream] - last, self.length)
            for stream in streams.tolist()
        ]
        starts = np.concatenate(found) if found else np.zeros(0, np.int64)
        if len(starts):
            return starts
        if offset:
            return self.starts(lengths, streams, 0, tails)
        raise DataError(
            f"data.batching.length: a text of {int(lengths.sum())} tokens has no window of {self.length}; "
            "choose a shorter length"
        )
