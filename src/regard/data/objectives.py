"""Objectives: the tasks that a model is trained on. An objective encodes training examples and collates batches.

To define a task, write a subclass of `Objective`. A subclass of `Translation`, `LanguageModelling` or `Classification`
is the easiest, because it inherits the defaults for training, evaluation and search.
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
    """A token table after a length limit was applied, and what the limit did to the examples."""

    table: Table
    kept: np.ndarray  # (examples,) bool: True for an example that is in the table, whole or in part
    cut: int = 0  # number of examples that were truncated or split


@dataclass(frozen=True)
class Item:
    """A batch, with counts of its labels and positions as Python integers."""

    batch: Batch
    labels: int  # number of labels that the loss is computed on
    places: int  # number of positions, in source and target together
    padding: int  # number of positions that are padding


@dataclass(frozen=True, slots=True)
class Packed:
    """The shape and the size limits that all packed batches share."""

    rows: int  # number of rows per batch; the last batch of an epoch is filled up with empty rows
    width: int  # number of tokens per row
    longest: int  # number of tokens in the longest example
    segments: int  # maximum number of examples in a row


class Objective(Spec):
    """Abstract base class of objectives: the tasks that a model is trained on.

    The class attributes are properties and default settings of the task. `table` encodes training examples as a token
    table, and `item` collates rows of the table into a batch.
    """

    __slots__ = ()
    # The data of a training example
    columns: ClassVar[tuple[str, ...]]  # names of the columns in the token table
    texts: ClassVar[tuple[str, ...]]  # names of the texts in an example, in order
    input_text: ClassVar[int] = 0  # index of the text that the model reads; validation examples are chosen by this text
    output_text: ClassVar[int] = 0  # index of the text that the model predicts
    encoded: ClassVar[Mapping[str, int]] = MappingProxyType({})  # column of token ids -> index of the text
    measured: ClassVar[tuple[str, ...]]  # columns whose lengths determine the size of a batch
    unread: ClassVar[Mapping[str, int]] = MappingProxyType({})  # column -> number of final ids that are not read
    summarizes: ClassVar[bool] = False  # True: the output is a summary, for which part of the input may be enough
    labelled: ClassVar[bool] = False  # True: text 0 is a class label, and the objective has a field `labels`
    packs: ClassVar[bool] = True  # True: several examples may share a batch row
    may_drop: ClassVar[bool] = False  # True: an example longer than max_len may be left out; False: it is cut
    languages: ClassVar[int] = 2  # number of natural languages in the text, for the size of a joint vocabulary
    # The model that learns the task, and the default settings
    model: ClassVar[ModelType]
    train: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # default `train` section of a recipe
    optimizers: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})  # kind of optimizer -> its settings
    search: ClassVar[str] = "beam"  # kind of the default `decode` section of a recipe
    # The metrics
    metrics: ClassVar[tuple[str, ...]] = ()  # validation metrics beside the loss, most informative first
    criterion: ClassVar[str] = "loss"  # the metric that ranks checkpoints, unless the recipe sets one
    provides: ClassVar[tuple[str, ...]] = ("likelihood",)  # inputs that metrics may use (`Metric.needs`)

    if TYPE_CHECKING:
        labels: tuple[str, ...]  # field of labelled objectives only; (): the sorted labels of the training text

    @property
    def stream(self) -> bool:
        """True if the corpus is read as one long sequence."""
        return False

    def pair(self, record: Record) -> tuple[str, str]:
        """Return the text that the model reads and the text that the model learns to predict."""
        return record[self.input_text], record[self.output_text]

    def with_labels(self, labels: Sequence[str]) -> "Objective":
        """Return the objective with its class labels set to `labels`."""
        return replace(self, labels=tuple(labels))  # type: ignore[type-var]  # every concrete spec is a dataclass

    def model_changes(self) -> dict[str, Any]:
        """Return the fields of the model spec that this objective sets, as {path: value}. Default: none."""
        return {}

    @abstractmethod
    def table(self, records: Sequence[Record], tokenizers: dict[str, Tokenizer]) -> Table:
        """Encode training examples as a token table."""

    def inputs(self, texts: Sequence[str], tokenizers: dict[str, Tokenizer]) -> Column:  # noqa: ARG002
        """Encode texts without labels as the input column of a classifier."""
        raise DataError(f"{self.kind} is not a classification; its model has no classes")

    @abstractmethod
    def limit(self, table: Table, max_len: int, cut: bool = False) -> Limited:
        """Limit every sequence of a token table to at most `max_len` tokens, not counting bos and eos.

        Depending on the task, an example with a longer sequence is left out, truncated or split. If `cut` is true,
        longer inputs are truncated, and only examples with longer outputs are left out.
        """

    @abstractmethod
    def item(self, columns: Mapping[str, Column], rows: Sequence[np.ndarray], packed: Packed | None = None) -> Item:
        """Collate a batch. `rows` has one array per batch row: the index of one example, or of several if packed."""


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
    """Return the table with every source truncated to `max_len` tokens plus the end-of-sentence token."""
    source = table["source"]
    ends = source.ids[source.offsets[1:] - 1]
    first, last = source.offsets[:-1], np.minimum(source.offsets[1:] - 1, source.offsets[:-1] + max_len)
    short = source.spans(first, last)
    ids = np.insert(short.ids[:], short.offsets[1:], ends, axis=0)
    return Table(table.columns | {"source": Column(ids, short.offsets + np.arange(len(short.offsets)))})


@dataclass(frozen=True, slots=True)
class Summarization(Translation):
    """Predict the summary of a document.

    The batches are those of a translation. Two things differ: the metrics are ROUGE scores, and long documents are
    truncated, or reduced to the most relevant paragraphs (`data.long`), but never left out.
    """

    kind = "summarization"
    summarizes = True
    metrics = ("rougeL", "rouge1", "rouge2", "perplexity")


@dataclass(frozen=True, slots=True)
class LanguageModelling(Objective):
    """Predict every token of a text from the preceding tokens.

    With the unit "stream", the whole corpus, including the line ends, is one text. With the unit "lines", each line is
    a separate text.
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
    """Predict which of `labels` a text has. The text begins with bos, so that a classifier may pool at position 0."""

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
    labels: tuple[str, ...] = ()  # (): the sorted labels of the training text

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
        """Collate a batch. It has no labels if `columns` has no column "label"."""
        if packed:
            raise DataError(
                "data.batching: a packed row holds several texts but would have one label; use kind 'buckets'"
            )
        text = Collated(columns["text"], rows)
        labels = Collated(columns["label"], rows).values[:, 0] if "label" in columns else None
        places = text.segments.numel()
        return Item(Batch(text.values, labels, text.segments), len(rows), places, places - text.total)


class Collated:
    """A column collated into batch rows: values, segment numbers (0: padding), and positions within the segments."""

    def __init__(self, column: Column, rows: Sequence[np.ndarray], packed: Packed | None = None, end: int = 0) -> None:
        """`end` is the number of final values to leave out of every example; `packed` has the shape if it is fixed."""
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
        """Return the batch rows with each value replaced by the one `by` positions later. If `by` is 1: the labels."""
        return self._rows(self._column.ids[self._sources + by])

    def _rows(self, values: np.ndarray) -> Tensor:
        """Arrange values into batch rows, with 0 at padding: ids (B, T) in int64, or vectors (B, T, C)."""
        dtype = values.dtype if values.ndim > 1 else np.int64
        filled = np.zeros((*self._real.shape, *values.shape[1:]), dtype)
        filled[self._real] = values
        return torch.from_numpy(filled)
