"""Objectives: the tasks a model is trained on. Each turns records of text into columns, and columns into batches.

A task is one subclass of `Objective`, most easily of `Translation`, `LanguageModelling` or `Classification`, whose
defaults for training, evaluation and search it inherits.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from regard.batch import Batch
from regard.data.token_store import Column, Table
from regard.data.tokenizer import Tokenizer
from regard.errors import DataError
from regard.tree import Spec

Record = tuple[str, ...]
ModelType = Literal["sequence_to_sequence", "language_model", "classifier"]


@dataclass(frozen=True)
class Limited:
    """A table in which no side is longer than a given number of tokens."""

    table: Table
    kept: np.ndarray  # (records,) bool: the records that are in the table, whole or in part
    cut: int = 0  # number of records that were truncated or split


@dataclass(frozen=True)
class Item:
    """A batch with its counts, which are known on the host."""

    batch: Batch
    labels: int  # labels that count in the loss
    places: int  # positions of both sides
    padding: int  # of these, padding


@dataclass(frozen=True, slots=True)
class Packed:
    """The shape that all packed batches of a loader share."""

    rows: int  # per batch; the last batch of an epoch is filled up with empty rows
    width: int  # tokens per row
    longest: int  # tokens of the longest example
    segments: int  # most examples in a row


class Objective(Spec):
    """Slot: a task. The class attributes are its defaults; `table` and `item` are its data."""

    __slots__ = ()
    # The data of a record
    columns: ClassVar[tuple[str, ...]]  # columns of the table
    texts: ClassVar[tuple[str, ...]]  # the texts of a record, in order
    input_text: ClassVar[int] = 0  # index of the text that the model reads; the corpus is split by it
    output_text: ClassVar[int] = 0  # index of the text that the model predicts
    encoded: ClassVar[Mapping[str, int]] = MappingProxyType({})  # column made by a tokenizer -> index of its text
    measured: ClassVar[tuple[str, ...]]  # columns whose length counts for batching
    unread: ClassVar[Mapping[str, int]] = MappingProxyType({})  # column -> ids at the end of an example not read
    labelled: ClassVar[bool] = False  # text 0 is a label; such an objective has a field `labels`
    packs: ClassVar[bool] = True  # several examples may share a row
    may_drop: ClassVar[bool] = False  # a record longer than max_len may be left out; otherwise it is cut
    languages: ClassVar[int] = 2  # natural languages in the text, for the size of a joint vocabulary
    # The model that learns it, and how
    model: ClassVar[ModelType]
    train: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # default `train` section of a recipe
    optimizers: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})  # kind -> settings of an optimizer
    search: ClassVar[str] = "beam"  # default `decode` section of a recipe
    # What is measured
    metrics: ClassVar[tuple[str, ...]] = ()  # on validation text beside the loss, the most telling first
    criterion: ClassVar[str] = "loss"  # the metric that ranks checkpoints, where the recipe names none
    provides: ClassVar[tuple[str, ...]] = ("likelihood",)  # what metrics can be computed from (`Metric.needs`)

    if TYPE_CHECKING:
        labels: tuple[str, ...]  # a field of every labelled objective; (): those of the training text, sorted

    @property
    def stream(self) -> bool:
        """The corpus is read as one long row."""
        return False

    def pair(self, record: Record) -> tuple[str, str]:
        """The text that the model reads and the text that it should predict."""
        return record[self.input_text], record[self.output_text]

    def with_labels(self, labels: Sequence[str]) -> "Objective":
        """The same objective with its labels in order; only for a labelled one."""
        return replace(self, labels=tuple(labels))  # type: ignore[type-var]  # every concrete spec is a dataclass

    def model_changes(self) -> dict[str, Any]:
        """Edits (path -> value) that a model needs for this objective; none by default."""
        return {}

    @abstractmethod
    def table(self, records: Sequence[Record], tokenizers: dict[str, Tokenizer]) -> Table:
        """The columns of records."""

    def inputs(self, texts: Sequence[str], tokenizers: dict[str, Tokenizer]) -> Column:  # noqa: ARG002
        """The column that a classifier reads, for texts without labels."""
        raise DataError(f"{self.kind} is not a classification; its model has no classes")

    @abstractmethod
    def limit(self, table: Table, max_len: int, cut: bool = False) -> Limited:
        """The table with sides of at most `max_len` tokens, not counting bos and eos.

        With `cut`, longer inputs are truncated where the objective would leave the record out.
        """

    @abstractmethod
    def item(self, columns: Mapping[str, Column], rows: Sequence[np.ndarray], packed: Packed | None = None) -> Item:
        """A batch. Each row is an array of example numbers: one example, or several in a packed row."""


@dataclass(frozen=True, slots=True)
class Translation(Objective):
    """Predict a target text from a source text.

    The source ends with eos. The decoder reads `bos t1 .. tn` and predicts `t1 .. tn eos`.
    """

    kind = "translation"
    columns = ("source", "target")
    texts = ("source", "target")
    output_text = 1
    encoded = MappingProxyType({"source": 0, "target": 1})
    measured = ("source", "target")
    unread = MappingProxyType({"target": 1})  # the decoder does not read eos, and bos is no label
    may_drop = True
    model = "sequence_to_sequence"
    train = MappingProxyType({"schedule": {"kind": "cosine", "floor": 0.02}})
    metrics = ("bleu", "chrf", "exact_match", "perplexity")
    provides = ("text", "likelihood")

    def table(self, records: Sequence[Record], tokenizers: dict[str, Tokenizer]) -> Table:
        source, target = tokenizers["source"], tokenizers["target"]
        pairs = [self.pair(record) for record in records]
        return Table(
            {
                "source": source.encode_column([text for text, _ in pairs]).between((), (source.eos,)),
                "target": target.encode_column([text for _, text in pairs]).between((target.bos,), (target.eos,)),
            }
        )

    def limit(self, table: Table, max_len: int, cut: bool = False) -> Limited:
        long = table["source"].lengths > max_len + 1
        kept = (table["target"].lengths <= max_len + 2) & (cut | ~long)
        remaining = table.take(np.flatnonzero(kept))
        return Limited(_cut_source(remaining, max_len) if cut else remaining, kept, int((long & kept).sum()))

    def item(self, columns: Mapping[str, Column], rows: Sequence[np.ndarray], packed: Packed | None = None) -> Item:
        source = Collated(columns["source"], rows, packed)
        target = Collated(columns["target"], rows, packed, end=1)
        batch = Batch(
            target.values,
            target.shifted(1),
            target.segments,
            source.values,
            source.segments,
            target_pos=target.positions if packed else None,
            source_pos=source.positions if packed else None,
            packed=packed is not None,
            segments=packed.segments if packed else 1,
            longest=packed.longest if packed else None,
        )
        places = source.segments.numel() + target.segments.numel()
        return Item(batch, target.total, places, places - source.total - target.total)


def _cut_source(table: Table, max_len: int) -> Table:
    """Truncate every source to `max_len` tokens and its end-of-sentence id."""
    source = table["source"]
    ends = source.ids[source.offsets[1:] - 1]
    first, last = source.offsets[:-1], np.minimum(source.offsets[1:] - 1, source.offsets[:-1] + max_len)
    short = source.spans(first, last)
    ids = np.insert(short.ids[:], short.offsets[1:], ends, axis=0)
    return Table(table.columns | {"source": Column(ids, short.offsets + np.arange(len(short.offsets)))})


@dataclass(frozen=True, slots=True)
class LanguageModelling(Objective):
    """Predict every token of a text from those before it.

    The corpus is one `stream` with its line ends, or each of its `lines` is a text of its own.
    """

    kind = "language_model"
    columns = ("target",)
    texts = ("target",)
    encoded = MappingProxyType({"target": 0})
    measured = ("target",)
    unread = MappingProxyType({"target": 1})
    languages = 1
    model = "language_model"
    train = MappingProxyType({"schedule": {"kind": "cosine", "floor": 0.02}})
    optimizers = MappingProxyType(
        {"adamw": {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.3}, "muon": {"weight_decay": 0.1}}
    )
    search = "sample"
    metrics = ("perplexity", "bits_per_byte")
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

    def limit(self, table: Table, max_len: int, cut: bool = False) -> Limited:  # noqa: ARG002
        column, kept = table["target"], np.ones(table.rows, np.bool_)
        if self.stream:
            return Limited(table, kept)
        # Neighbouring chunks share a token: the last label of one is the first input of the next.
        chunks = np.maximum(1, -(-(column.lengths - 1) // (max_len + 1)))
        number = np.arange(chunks.sum()) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        first = np.repeat(column.offsets[:-1], chunks) + number * (max_len + 1)
        last = np.minimum(first + max_len + 2, np.repeat(column.offsets[1:], chunks))
        return Limited(Table({"target": column.spans(first, last)}), kept, int((chunks > 1).sum()))

    def item(self, columns: Mapping[str, Column], rows: Sequence[np.ndarray], packed: Packed | None = None) -> Item:
        target = Collated(columns["target"], rows, packed, end=1)
        places = target.segments.numel()
        batch = Batch(
            target.values,
            target.shifted(1),
            target.segments if packed or target.total < places else None,
            target_pos=target.positions if packed else None,
            packed=packed is not None,
            segments=packed.segments if packed else 1,
            longest=packed.longest if packed else None,
        )
        return Item(batch, target.total, places, places - target.total)


@dataclass(frozen=True, slots=True)
class Classification(Objective):
    """Predict one of `labels` from a text. The text follows bos, at whose position a classifier may pool."""

    kind = "classification"
    columns = ("text", "label")
    texts = ("label", "text")
    input_text = 1
    encoded = MappingProxyType({"text": 1})
    measured = ("text",)
    labelled = True
    packs = False
    model = "classifier"
    train = MappingProxyType({"schedule": {"kind": "cosine", "floor": 0.1}})
    optimizers = MappingProxyType({"adamw": {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}})
    metrics = ("accuracy",)
    criterion = "accuracy"
    provides = ("labels",)
    labels: tuple[str, ...] = ()  # (): those of the training text, sorted

    def inputs(self, texts: Sequence[str], tokenizers: dict[str, Tokenizer]) -> Column:
        tokenizer = tokenizers["text"]
        return tokenizer.encode_column(list(texts)).between((tokenizer.bos,), ())

    def table(self, records: Sequence[Record], tokenizers: dict[str, Tokenizer]) -> Table:
        numbers = {label: n for n, label in enumerate(self.labels)}
        unknown = [label for label, _ in records if label not in numbers]
        if unknown:
            known = ", ".join(self.labels)
            raise DataError(f"label {unknown[0]!r} does not occur in the training text; known labels: {known}")
        text = self.inputs([text for _, text in records], tokenizers)
        return Table({"text": text, "label": Column.of([[numbers[label]] for label, _ in records])})

    def limit(self, table: Table, max_len: int, cut: bool = False) -> Limited:  # noqa: ARG002
        text = table["text"]
        short = text.spans(text.offsets[:-1], np.minimum(text.offsets[1:], text.offsets[:-1] + max_len + 1))
        truncated = int((text.lengths > max_len + 1).sum())
        return Limited(Table(table.columns | {"text": short}), np.ones(table.rows, np.bool_), truncated)

    def item(self, columns: Mapping[str, Column], rows: Sequence[np.ndarray], packed: Packed | None = None) -> Item:
        """A batch; without labels where `columns` has none."""
        if packed:
            raise DataError("data.batching: a packed row has no label of its own; classify with kind 'buckets'")
        text = Collated(columns["text"], rows)
        labels = Collated(columns["label"], rows).values[:, 0] if "label" in columns else None
        places = text.segments.numel()
        return Item(Batch(text.values, labels, text.segments), len(rows), places, places - text.total)


class Collated:
    """Examples collated into rows: their values, the segment of each position and its position in that segment."""

    def __init__(self, column: Column, rows: Sequence[np.ndarray], packed: Packed | None = None, end: int = 0) -> None:
        """`end` leaves out that many values at the end of every example; `packed` gives the shape."""
        examples = np.concatenate(rows)
        first, last = column.offsets[examples], column.offsets[examples + 1] - end
        lengths = last - first
        per_row = np.asarray([len(row) for row in rows])
        ends = np.cumsum(per_row)
        totals = np.add.reduceat(lengths, ends - per_row)
        self.total = int(totals.sum())
        shape = (packed.rows, packed.width) if packed else (len(rows), int(totals.max()))
        real = np.arange(shape[1]) < np.pad(totals, (0, shape[0] - len(rows)))[:, None]
        within = np.arange(self.total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self._column, self._sources, self._real = column, within + np.repeat(first, lengths), real
        self.values = self.shifted(0)
        numbers = np.arange(len(examples)) - np.repeat(ends - per_row, per_row) + 1
        self.segments = self._rows(np.repeat(numbers, lengths))
        self.positions = self._rows(within)

    def shifted(self, by: int) -> Tensor:
        """The values that stand `by` places later in the column, collated in the same way."""
        return self._rows(self._column.ids[self._sources + by])

    def _rows(self, values: np.ndarray) -> Tensor:
        """Values in reading order as rows, 0 at padding: ids (B, T) as int64, vectors (B, T, C) as they are."""
        dtype = values.dtype if values.ndim > 1 else np.int64
        filled = np.zeros((*self._real.shape, *values.shape[1:]), dtype)
        filled[self._real] = values
        return torch.from_numpy(filled)
