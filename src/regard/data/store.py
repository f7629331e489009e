"""The token store: ids on disk, memory-mapped, so that a corpus may be larger than memory.

A table has columns (`source`, `target`, `label`); a column is one file of ids laid end to end and one of offsets.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
        return cls({name: _in_memory(rows) for name, rows in columns.items()})

    @classmethod
    def open(cls, folder: Path) -> "Table":
        """The table that `write` left in `folder`."""
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            columns = {name: _mapped(folder, name, about) for name, about in manifest["columns"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{folder} is no token store or a damaged one ({error}); prepare the data again") from None
        return cls(columns)


def _in_memory(rows: Sequence[Sequence[int]]) -> Column:
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    flat = [np.asarray(row, dtype=np.uint32) for row in rows]
    return Column(np.concatenate(flat) if flat else np.zeros(0, np.uint32), offsets)


def _mapped(folder: Path, name: str, about: dict[str, Any]) -> Column:
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
    """Writes a table row by row; `close` adds the manifest, without which the table does not exist."""

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

    def add(self, rows: Iterable[dict[str, Sequence[int]]]) -> None:
        """Append rows, each with all columns."""
        chunk = list(rows)
        for name, column in self.columns.items():
            column.extend([row[name] for row in chunk])

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

    def extend(self, rows: list[Sequence[int]]) -> None:
        if not rows:
            return
        data = np.concatenate([np.asarray(row, dtype=self.dtype) for row in rows]).tobytes()
        ends = self.total + np.cumsum([len(row) for row in rows], dtype="<i8")
        self.ids.write(data)
        self.offsets.write(ends.tobytes())
        self.digest.update(data)
        self.total, self.rows = int(ends[-1]), self.rows + len(rows)

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
