"""The token store: ids on disk, memory-mapped, so that a corpus may be larger than memory.

A table has columns (`source`, `target`, `label`); a column is one file of ids laid end to end and one of offsets.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from regard.errors import DataError

MANIFEST = "manifest.json"


@runtime_checkable
class Ids(Protocol):
    """Ids that are read by slices and by arrays of places: an array, or several that are read as one."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: Any, /) -> Any: ...


@dataclass(frozen=True)
class Column:
    """Sequences of ids, laid end to end."""

    ids: Ids  # (N,) uint16 or uint32, usually memory-mapped
    offsets: np.ndarray  # (rows + 1,) int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """How long every sequence is."""
        return np.diff(self.offsets)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Column":
        """A column in memory, of lists."""
        offsets = _ends([len(row) for row in rows])
        return cls(np.fromiter(chain.from_iterable(rows), np.uint32, int(offsets[-1])), offsets)

    def spans(self, first: np.ndarray, last: np.ndarray) -> "Column":
        """What stands between places of `ids`, as sequences of a column in memory."""
        offsets = _ends(last - first)
        at = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], last - first)
        return Column(self.ids[at], offsets)

    def take(self, rows: np.ndarray) -> "Column":
        """The given sequences."""
        return self.spans(self.offsets[rows], self.offsets[rows + 1])

    def between(self, before: Sequence[int], after: Sequence[int]) -> "Column":
        """Every sequence with ids before and after it."""
        more = len(before) + len(after)
        offsets = self.offsets + more * np.arange(len(self.offsets))
        ids = np.empty(offsets[-1], np.uint32)
        ids[np.arange(len(self.ids)) + np.repeat(offsets[:-1] - self.offsets[:-1], self.lengths) + len(before)] = (
            self.ids[:]
        )
        for n, one in enumerate(before):
            ids[offsets[:-1] + n] = one
        for n, one in enumerate(after):
            ids[offsets[1:] - len(after) + n] = one
        return Column(ids, offsets)


def _ends(lengths: np.ndarray | list[int]) -> np.ndarray:
    """Where sequences of such lengths begin, laid end to end, and where the last ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


class Table:
    """Columns of one number of rows."""

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
        """A table in memory, of lists."""
        return cls({name: Column.of(rows) for name, rows in columns.items()})

    def take(self, rows: np.ndarray) -> "Table":
        """The given rows."""
        return Table({name: column.take(rows) for name, column in self.columns.items()})

    @classmethod
    def open(cls, folder: Path) -> "Table":
        """The table that `write` left in `folder`."""
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            columns = {name: _mapped(folder, name, about) for name, about in manifest["columns"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{folder} is no token store or a damaged one ({error}); prepare the data again") from None
        return cls(columns)


def _mapped(folder: Path, name: str, about: dict[str, Any]) -> Column:
    if about["dtype"] not in ("<u2", "<u4"):
        raise ValueError(f"{name} has ids of type {about['dtype']!r}")
    dtype = np.dtype(about["dtype"])
    column = Column(_file(folder / f"{name}.ids", dtype), _file(folder / f"{name}.offsets", np.dtype("<i8")))
    found, wanted = (len(column), len(column.ids)), (about["rows"], about["ids"])
    if found != wanted:
        raise ValueError(f"{name} has {found[0]} rows of {found[1]} ids instead of {wanted[0]} of {wanted[1]}")
    if column.offsets[0] != 0 or column.offsets[-1] != len(column.ids) or (column.lengths < 0).any():
        raise ValueError(f"the rows of {name} are not where its ids are")
    return column


def _file(path: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


class Writer:
    """Writes a table piece by piece; `close` adds the manifest, without which the table does not exist."""

    def __init__(self, folder: Path, columns: Sequence[str], vocab: int, stream: bool = False) -> None:
        """`stream` makes one long row of all that is added."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.stream = folder, stream
        self.dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
        self.columns = {name: _Growing(folder / name, self.dtype) for name in columns}

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
        """Finish the files and open the table."""
        about = {name: column.close(self.stream) for name, column in self.columns.items()}
        text = json.dumps({"columns": {name: {"dtype": self.dtype.str} | a for name, a in about.items()}}, indent=2)
        (self.folder / MANIFEST).write_text(text, encoding="utf-8")
        return Table.open(self.folder)


class _Growing:
    """One column being written."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.ids: BinaryIO = open(f"{path}.ids", "wb")  # noqa: SIM115  # closed by close()
        self.offsets: BinaryIO = open(f"{path}.offsets", "wb")  # noqa: SIM115
        self.offsets.write(np.zeros(1, "<i8").tobytes())
        self.total, self.rows, self.digest = 0, 0, hashlib.sha256()

    def extend(self, column: Column) -> None:
        ids = np.asarray(column.ids[:])
        if len(ids) and int(ids.max()) > np.iinfo(self.dtype).max:
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
        return {"rows": self.rows, "ids": self.total, "sha256": self.digest.hexdigest()}


def chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of at most `size` items."""
    chunk: list[Any] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
