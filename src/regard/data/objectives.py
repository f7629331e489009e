"""Objective slot: what is learned from a record. Texts become columns of ids once, columns batches every step."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from regard.batch import Batch
from regard.data.token_store import Column, Table
from regard.data.tokenizer import Tokenizer
from regard.errors import DataError
from regard.tree import Spec

Record = tuple[str, ...]


@dataclass(frozen=True)
class Fitted:
    """What is left of the records of a table when no side may be longer than so many tokens."""

    table: Table
    kept: np.ndarray  # which records are in it, whole or in part
    cut: int = 0  # how many of these in part, or in pieces


@dataclass(frozen=True)
class Item:
    """A batch, and what is known of it on the host: labels that count, and places that hold padding."""

    batch: Batch
    labels: int
    places: int  # all places of both sides
    padding: int


@dataclass(frozen=True, slots=True)
class Packed:
    """What all packed batches of a stream have in common, so that what is made for one fits the next."""

    rows: int  # of every batch: the last of an epoch is filled up with empty ones
    width: int  # of every row
    longest: int  # no example is longer, as it is laid into a row
    segments: int  # no row holds more examples


class Objective(Spec):
    """Slot: from records to columns, and from columns to batches."""

    __slots__ = ()
    columns: ClassVar[tuple[str, ...]]
    texts: ClassVar[tuple[str, ...]]  # the names of a record's texts, in order
    read: ClassVar[int] = 0  # which of them the model reads, by which a corpus is split
    said: ClassVar[int] = 0  # which of them it says
    encoded: ClassVar[dict[str, int]]  # columns that a tokenizer makes, and the texts they are made from
    measured: ClassVar[tuple[str, ...]]  # the columns whose length counts for batching
    unread: ClassVar[Mapping[str, int]] = MappingProxyType({})  # ids of a column's examples that take up no place

    @property
    def stream(self) -> bool:
        """Whether a text is one long row."""
        return False

    @abstractmethod
    def table(self, records: Sequence[Record], tokenizers: dict[str, Tokenizer]) -> Table:
        """The columns of records, in ids."""

    @abstractmethod
    def fitted(self, table: Table, max_len: int, cuts: bool = False) -> Fitted:
        """Rows as they are, cut, or left out if a side is longer than `max_len`; bos and eos do not count.

        `cuts` keeps the beginning of a longer source, where the pair would be left out.
        """

    @abstractmethod
    def item(self, columns: dict[str, Column], rows: Sequence[np.ndarray], packed: Packed | None = None) -> Item:
        """A batch of the given rows of examples, which are packed or hold one each."""


@dataclass(frozen=True, slots=True)
class Translation(Objective):
    """From a source to a target text. The source ends with eos; the model reads `bos t1 .. tn`, says `t1 .. tn eos`."""

    kind = "translation"
    columns = ("source", "target")
    texts = ("source", "target")
    said = 1
    encoded = {"source": 0, "target": 1}  # noqa: RUF012
    measured = ("source", "target")
    unread = MappingProxyType({"target": 1})  # what is read ends before eos, what is said begins after bos

    def table(self, records: Sequence[Record], tokenizers: dict[str, Tokenizer]) -> Table:
        source, target = tokenizers["source"], tokenizers["target"]
        return Table(
            {
                "source": source.encode_column([record[0] for record in records]).between((), (source.eos,)),
                "target": target.encode_column([record[1] for record in records]).between((target.bos,), (target.eos,)),
            }
        )

    def fitted(self, table: Table, max_len: int, cuts: bool = False) -> Fitted:
        long = table["source"].lengths > max_len + 1
        kept = (table["target"].lengths <= max_len + 2) & (cuts | ~long)
        left = table.take(np.flatnonzero(kept))
        return Fitted(_cut_source(left, max_len) if cuts else left, kept, int((long & kept).sum()))

    def item(self, columns: dict[str, Column], rows: Sequence[np.ndarray], packed: Packed | None = None) -> Item:
        source = Laid(columns["source"], rows, packed)
        read = Laid(columns["target"], rows, packed, end=1)
        batch = Batch(
            read.ids,
            read.later(1),
            read.seg,
            source.ids,
            source.seg,
            target_pos=read.pos if packed else None,
            source_pos=source.pos if packed else None,
            packed=packed is not None,
            segments=packed.segments if packed else 1,
            longest=packed.longest if packed else None,
        )
        places = source.ids.numel() + read.ids.numel()
        return Item(batch, read.total, places, places - source.total - read.total)


def _cut_source(table: Table, max_len: int) -> Table:
    """The table with the beginning of every source, followed by its end-of-sentence id."""
    source = table["source"]
    ends = source.ids[source.offsets[1:] - 1]
    first, last = source.offsets[:-1], np.minimum(source.offsets[1:] - 1, source.offsets[:-1] + max_len)
    short = source.spans(first, last)
    closed = Column(np.insert(short.ids[:], short.offsets[1:], ends), short.offsets + np.arange(len(short.offsets)))
    return Table(table.columns | {"source": closed})


@dataclass(frozen=True, slots=True)
class LanguageModelling(Objective):
    """One text, said token by token: as one endless `stream` (with its line ends), or every line as its own text."""

    kind = "language_model"
    columns = ("target",)
    texts = ("target",)
    encoded = {"target": 0}  # noqa: RUF012
    measured = ("target",)
    unread = MappingProxyType({"target": 1})
    unit: Literal["stream", "lines"] = "stream"

    @property
    def stream(self) -> bool:
        return self.unit == "stream"

    def table(self, records: Sequence[Record], tokenizers: dict[str, Tokenizer]) -> Table:
        tokenizer = tokenizers["target"]
        if self.unit == "stream":
            return Table({"target": tokenizer.encode_column([record[0] + "\n" for record in records])})
        encoded = tokenizer.encode_column([record[0] for record in records])
        return Table({"target": encoded.between((tokenizer.bos,), (tokenizer.eos,))})

    def fitted(self, table: Table, max_len: int, cuts: bool = False) -> Fitted:  # noqa: ARG002
        column, kept = table["target"], np.ones(table.rows, np.bool_)
        if self.stream:
            return Fitted(table, kept)
        # Neighbouring pieces share a token: the last label of one is the first that the next reads.
        pieces = np.maximum(1, -(-(column.lengths - 1) // (max_len + 1)))
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        first = np.repeat(column.offsets[:-1], pieces) + within * (max_len + 1)
        last = np.minimum(first + max_len + 2, np.repeat(column.offsets[1:], pieces))
        return Fitted(Table({"target": column.spans(first, last)}), kept, int((pieces > 1).sum()))

    def item(self, columns: dict[str, Column], rows: Sequence[np.ndarray], packed: Packed | None = None) -> Item:
        read = Laid(columns["target"], rows, packed, end=1)
        batch = Batch(
            read.ids,
            read.later(1),
            read.seg if packed or read.total < read.ids.numel() else None,
            target_pos=read.pos if packed else None,
            packed=packed is not None,
            segments=packed.segments if packed else 1,
            longest=packed.longest if packed else None,
        )
        return Item(batch, read.total, read.ids.numel(), read.ids.numel() - read.total)


@dataclass(frozen=True, slots=True)
class Classification(Objective):
    """From a text to one of `labels`. The text follows bos, whose place a classifier may read the answer from."""

    kind = "classification"
    columns = ("text", "label")
    texts = ("label", "text")
    read = 1
    encoded = {"text": 1}  # noqa: RUF012
    measured = ("text",)
    labels: tuple[str, ...] = ()  # (): those of the training text, sorted

    def table(self, records: Sequence[Record], tokenizers: dict[str, Tokenizer]) -> Table:
        tokenizer = tokenizers["text"]
        numbers = {label: n for n, label in enumerate(self.labels)}
        unknown = [label for label, _ in records if label not in numbers]
        if unknown:
            known = ", ".join(self.labels)
            raise DataError(f"label {unknown[0]!r} does not occur in the training text; known labels: {known}")
        text = tokenizer.encode_column([text for _, text in records]).between((tokenizer.bos,), ())
        return Table({"text": text, "label": Column.of([[numbers[label]] for label, _ in records])})

    def fitted(self, table: Table, max_len: int, cuts: bool = False) -> Fitted:  # noqa: ARG002
        text = table["text"]
        short = text.spans(text.offsets[:-1], np.minimum(text.offsets[1:], text.offsets[:-1] + max_len + 1))
        cut = int((text.lengths > max_len + 1).sum())
        return Fitted(Table(table.columns | {"text": short}), np.ones(table.rows, np.bool_), cut)

    def item(self, columns: dict[str, Column], rows: Sequence[np.ndarray], packed: Packed | None = None) -> Item:
        if packed:
            raise DataError("data.batching: a packed row has no label of its own; classify with kind 'buckets'")
        text, label = Laid(columns["text"], rows), Laid(columns["label"], rows)
        batch = Batch(text.ids, label.ids[:, 0], text.seg)
        return Item(batch, len(rows), text.ids.numel(), text.ids.numel() - text.total)


class Laid:
    """Examples laid into rows: ids, the segment of each and its position in it."""

    def __init__(self, column: Column, rows: Sequence[np.ndarray], packed: Packed | None = None, end: int = 0) -> None:
        """`end` leaves out that many ids at the end of every example; `packed` gives the shape."""
        examples = np.concatenate(rows)
        first, last = column.offsets[examples], column.offsets[examples + 1] - end
        lengths = last - first
        per_row = np.asarray([len(row) for row in rows])
        ends = np.cumsum(per_row)
        totals = np.add.reduceat(lengths, ends - per_row)
        self.total = int(totals.sum())
        shape = (packed.rows, packed.width) if packed else (len(rows), int(totals.max()))
        real = np.arange(shape[1]) < np.pad(totals, (0, shape[0] - len(rows)))[:, None]
        # Where each id comes from: its place in its example, after the example's beginning.
        within = np.arange(self.total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self._column, self._at, self._real, self._shape = column, within + np.repeat(first, lengths), real, shape
        self.ids = self.later(0)
        numbers = np.arange(len(examples)) - np.repeat(ends - per_row, per_row) + 1
        self.seg = self._rows(np.repeat(numbers, lengths))
        self.pos = self._rows(within)

    def later(self, by: int) -> Tensor:
        """The ids that stand so many places later in the column, laid in the same way."""
        return self._rows(self._column.ids[self._at + by])

    def _rows(self, values: np.ndarray) -> Tensor:
        """Values in reading order as rows, 0 where there is padding."""
        filled = np.zeros(self._shape, np.int64)
        filled[self._real] = values
        return torch.from_numpy(filled)
