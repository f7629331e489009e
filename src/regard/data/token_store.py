"""The token store: memory-mapped tables of token ids or vectors. A corpus may therefore be larger than memory.

A token table has one row per training example, and columns such as `source`, `target` and `label`. A column is stored
as a file of concatenated values and a file of offsets.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from regard.errors import DataError

MANIFEST = "manifest.json"
VECTORS = "<f4"


@runtime_checkable
class Ids(Protocol):
    """Protocol of array-like values that can be indexed by slices and by arrays of indices."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: Any, /) -> Any: ...


@dataclass(frozen=True)
class Column:
    """One column of a token table: concatenated sequences of ids or of vectors, one sequence per row."""

    ids: Ids  # (N,) uint16 or uint32, or vectors (N, C) float32; usually memory-mapped
    offsets: np.ndarray  # (rows + 1,) int64: where each sequence begins in `ids`; the last offset is the end

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of all sequences."""
        return np.diff(self.offsets)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Column":
        """Return an in-memory column with the given sequences of ids."""
        offsets = _offsets([len(row) for row in rows])
        return cls(np.fromiter(chain.from_iterable(rows), np.uint32, int(offsets[-1])), offsets)

    @classmethod
    def of_vectors(cls, rows: Sequence[Sequence[Sequence[float]]], channels: int) -> "Column":
        """Return an in-memory column with the given sequences of vectors, which must have `channels` numbers each."""
        for number, row in enumerate(rows, 1):
            if any(len(vector) != channels for vector in row):
                raise DataError(f"record {number}: every vector needs {channels} numbers")
        values = np.asarray(list(chain.from_iterable(rows)), np.float32).reshape(-1, channels)
        return cls(values, _offsets([len(row) for row in rows]))

    def spans(self, first: np.ndarray, last: np.ndarray) -> "Column":
        """Return an in-memory column whose sequence i has the values ids[first[i] : last[i]]."""
        offsets = _offsets(last - first)
        at = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], last - first)
        return Column(self.ids[at], offsets)

    def take(self, rows: np.ndarray) -> "Column":
        """Return an in-memory column of the sequences with the given indices."""
        return self.spans(self.offsets[rows], self.offsets[rows + 1])

    def between(self, before: Sequence[int], after: Sequence[int]) -> "Column":
        """Return an in-memory column with `before` prepended and `after` appended to every sequence of ids."""
        offsets = self.offsets + (len(before) + len(after)) * np.arange(len(self.offsets))
        ids = np.empty(offsets[-1], np.uint32)
        shifts = offsets[:-1] + len(before) - self.offsets[:-1]
        ids[np.arange(len(self.ids)) + np.repeat(shifts, self.lengths)] = self.ids[:]
        ids[offsets[:-1, None] + np.arange(len(before))] = before
        ids[offsets[1:, None] + np.arange(-len(after), 0)] = after
        return Column(ids, offsets)


def _offsets(lengths: np.ndarray | list[int]) -> np.ndarray:
    """Return the offsets of concatenated sequences of the given lengths, from 0 to the end of the last sequence."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


class Table:
    """A token table: columns with the same number of rows."""

    def __init__(self, columns: dict[str, Column]) -> None:
        self.columns = columns
        rows = {len(column) for column in columns.values()}
        if len(rows) != 1:
            raise DataError(f"the columns of a table have different numbers of rows: {sorted(rows)}")
        self.rows = rows.pop()

    def __getitem__(self, column: str) -> Column:
        return self.columns[column]

    @classmethod
    def of(cls, **columns: Sequence[Sequence[int]]) -> "Table":
        """Return an in-memory table. Each keyword argument is a column: a list of ids for every row."""
        return cls({name: Column.of(rows) for name, rows in columns.items()})

    def take(self, rows: np.ndarray) -> "Table":
        """Return an in-memory table of the rows with the given indices."""
        return Table({name: column.take(rows) for name, column in self.columns.items()})

    @classmethod
    def open(cls, folder: Path) -> "Table":
        """Return the table that a `Writer` wrote to `folder`."""
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            columns = {name: _open_column(folder, name, about) for name, about in manifest["columns"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{folder} is damaged or not a token store ({error}); prepare the data again") from None
        return cls(columns)


def _open_column(folder: Path, name: str, about: Mapping[str, Any]) -> Column:
    if about["dtype"] not in ("<u2", "<u4", VECTORS):
        raise ValueError(f"{name} has ids of type {about['dtype']!r}")
    ids = _mapped(folder / f"{name}.ids", np.dtype(about["dtype"]))
    if about["dtype"] == VECTORS:
        ids = ids.reshape(-1, about["channels"])
    column = Column(ids, _mapped(folder / f"{name}.offsets", np.dtype("<i8")))
    actual, expected = (len(column), len(ids)), (about["rows"], about["ids"])
    if actual != expected:
        raise ValueError(f"{name} has {actual[0]} rows of {actual[1]} ids instead of {expected[0]} of {expected[1]}")
    if column.offsets[0] != 0 or column.offsets[-1] != len(ids) or (column.lengths < 0).any():
        raise ValueError(f"the offsets of {name} do not match its ids")
    return column


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


class Writer:
    """Writes a token table chunk by chunk. The table cannot be opened before `close` has written its manifest."""

    def __init__(self, folder: Path, columns: Sequence[str], vocab: int, stream: bool = False) -> None:
        """`vocab` is the vocabulary size. If `stream` is true, all rows are joined into one long row."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.stream = folder, stream
        dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
        self.columns = {name: _ColumnWriter(folder / name, dtype) for name in columns}

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for column in self.columns.values():
            column.ids.close()
            column.offsets.close()

    def add(self, table: Table) -> None:
        """Append the rows of a table with the same columns."""
        for name, column in self.columns.items():
            column.extend(table[name])

    def close(self) -> Table:
        """Complete the files of the table, and return the memory-mapped table."""
        about = {name: column.close(self.stream) for name, column in self.columns.items()}
        (self.folder / MANIFEST).write_text(json.dumps({"columns": about}, indent=2), encoding="utf-8")
        return Table.open(self.folder)


class _ColumnWriter:
    """Writes one column to its files of values and offsets."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype: np.dtype = dtype
        self.channels: int | None = None  # numbers per vector; None: the values are ids
        self.ids: BinaryIO = open(f"{path}.ids", "wb")  # noqa: SIM115  # closed by close()
        self.offsets: BinaryIO = open(f"{path}.offsets", "wb")  # noqa: SIM115
        self.offsets.write(np.zeros(1, "<i8").tobytes())
        self.total, self.rows, self.digest = 0, 0, hashlib.sha256()

    def extend(self, column: Column) -> None:
        ids = np.asarray(column.ids[:])
        if ids.ndim > 1:
            self.dtype, self.channels = np.dtype(VECTORS), ids.shape[1]
        elif len(ids) and int(ids.max()) > np.iinfo(self.dtype).max:
            raise OverflowError(f"id {int(ids.max())} is beyond the vocabulary")
        data = ids.astype(self.dtype).tobytes()
        self.ids.write(data)
        self.offsets.write((self.total + column.offsets[1:]).astype("<i8").tobytes())
        self.digest.update(data)
        self.total, self.rows = self.total + len(ids), self.rows + len(column)

    def close(self, stream: bool) -> dict[str, Any]:
        self.ids.close()
        if stream:
            self.offsets.seek(0)
            self.offsets.truncate()
            self.offsets.write(np.asarray([0, self.total], "<i8").tobytes())
            self.rows = 1
        self.offsets.close()
        about = {"dtype": self.dtype.str, "rows": self.rows, "ids": self.total, "sha256": self.digest.hexdigest()}
        return about if self.channels is None else about | {"channels": self.channels}


def chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield the items in lists of `size` items; the last list may be shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
