"""Read text files lazily: plain, gzip or xz, in strict UTF-8, with one training example per line.

Only a line feed ends a line, unlike in `str.splitlines`, so line counts agree with `wc -l` and parallel files stay
aligned.
"""

import gzip
import io
import json
import lzma
import os
import stat
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from regard.errors import DataError, SpecError, nearest
from regard.tree import Spec

C = TypeVar("C", bound="Corpus")

MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00"}  # the first bytes of a compressed file
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHUNK = 1 << 20  # bytes per read, so that a binary file is refused before it fills the memory
# Maximum length of a line in bytes. text8 is one line of 100 MB. A compressed file of 1 MB may expand to a line that
# fills the memory.
MAX_LINE = 1 << 28
FASTTEXT = "__label__"
UNREADABLE = (EOFError, OSError, lzma.LZMAError, zlib.error)


@runtime_checkable
class LineStream(Protocol):
    """Protocol of a binary stream such as an open file, a decompressor or `sys.stdin.buffer`."""

    def readline(self, size: int = -1, /) -> bytes:
        """Return the next line including its line feed, but at most `size` bytes (-1: no limit)."""
        ...


def lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines of a text file without line ends; `.gz` and `.xz` files are decompressed."""
    name = os.fspath(path)
    with _opened(name) as file, _decompressed(file, name) as stream:
        decoded = decoded_lines(stream, name)
        first = next(decoded, None)
        if first is None:
            raise _empty(name)
        yield first
        yield from decoded


def raw_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the lines of a text file as bytes, with their line ends; `.gz` and `.xz` files are decompressed."""
    name = os.fspath(path)
    with _opened(name) as file, _decompressed(file, name) as stream:
        for number in count(1):
            raw = _raw_line(stream, name, number)
            if not raw:
                return
            yield raw


def decoded_lines(stream: LineStream, name: str) -> Iterator[str]:
    """Decode the UTF-8 lines of a binary stream such as `sys.stdin.buffer`, and yield each as soon as it is complete.

    A carriage return before the line feed and a byte-order mark before the first line are removed.
    """
    for number in count(1):
        raw = _raw_line(stream, name, number)
        if number == 1:
            raw = raw.removeprefix(BYTE_ORDER_MARK)
        if not raw:
            return
        if raw.endswith(b"\n"):
            raw = raw[: -2 if raw.endswith(b"\r\n") else -1]
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}: line {number} is not text in UTF-8: byte 0x{raw[error.start]:02x} at position "
                f"{error.start + 1} of the line; convert the file to UTF-8"
            ) from None
        yield line


def _raw_line(stream: LineStream, name: str, number: int) -> bytes:
    chunks, size = [], 0
    while True:
        try:
            chunk = stream.readline(CHUNK)
        except UNREADABLE as error:
            raise DataError(f"{name}: is damaged or cut short: line {number} cannot be read ({error})") from None
        if b"\0" in chunk:
            raise DataError(f"{name}: line {number} is not text: it has a NUL byte, as binary files and UTF-16 do")
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_LINE + chunk.endswith(b"\n"):
            most = f"{MAX_LINE >> 20} MiB" if MAX_LINE >= 1 << 20 else f"{MAX_LINE} bytes"
            raise DataError(f"{name}: line {number} is longer than {most}; break the text into lines")
        if len(chunk) < CHUNK or chunk.endswith(b"\n"):
            return b"".join(chunks)


def _empty(name: str) -> DataError:
    return DataError(f"{name}: is empty; give a file with at least one line")


def _opened(name: str) -> io.BufferedReader:
    try:
        return Path(name).open("rb")
    except FileNotFoundError:
        gone = (
            "; a pipe exists only while the command that made it runs"
            if name.startswith(("/dev/fd/", "/proc/"))
            else ""
        )
        raise DataError(f"{name}: there is no such file{gone}") from None
    except IsADirectoryError:
        raise DataError(f"{name}: is a folder; name a file in it") from None
    except PermissionError:
        raise DataError(f"{name}: permission denied; make the file readable") from None
    except (OSError, ValueError) as error:  # a ValueError is a name that no file can have
        raise DataError(f"{name!r}: cannot be opened ({error})") from None


def _decompressed(file: io.BufferedReader, name: str) -> io.BufferedReader | gzip.GzipFile | lzma.LZMAFile:
    """Return a file, decompressed if `name` ends in `.gz` or `.xz`; raise DataError if the first bytes do not match."""
    head, ending = file.peek(8), Path(name).suffix.lower()
    for suffix, magic in MAGIC.items():
        if head.startswith(magic) and ending != suffix:
            raise DataError(f"{name}: is not text but compressed; rename it to end in {suffix}")
        if head and ending == suffix and not head.startswith(magic):
            raise DataError(f"{name}: ends in {suffix} but is not a {suffix} file; rename it")
    if head and ending == ".gz":
        return gzip.GzipFile(fileobj=file)
    if head and ending == ".xz":
        return lzma.LZMAFile(file, format=lzma.FORMAT_XZ)
    return file


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a pipe, such as the shell's `<(zcat a.gz)`. A pipe can be read only once."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):  # reported when it is opened
        return False


def check_file(path: str) -> None:
    """Raise DataError if a file cannot be opened or is empty. Pipes are not checked.

    Checking all files first avoids an error after a long time of reading.
    """
    if not is_pipe(path):
        with _opened(path) as file:
            _decompressed(file, path)
            if not file.peek(1):
                raise _empty(path)


def spool(path: str, to: Path) -> None:
    """Copy a pipe to a file. Unless the pipe is compressed, stop at a NUL byte, because binary input may be endless."""
    with _opened(path) as pipe, open(to, "wb") as file:
        magic = MAGIC.get(Path(path).suffix.lower())
        compressed = magic is not None and pipe.peek(len(magic)).startswith(magic)
        while chunk := pipe.read1(CHUNK):
            file.write(chunk)
            if b"\0" in chunk and not compressed:
                break


class Corpus(Spec):
    """Abstract base class of corpora: files with training examples. Relative paths start at the working directory."""

    __slots__ = ()
    texts: ClassVar[int]  # number of strings per example
    labelled: ClassVar[bool] = False  # True if the first string is a class label
    paths: ClassVar[tuple[str, ...]] = ("path",)  # fields that are file names
    weight: float  # number of times that an epoch contains each example

    def check(self) -> None:
        if self.weight <= 0.0:
            raise SpecError("weight", f"must be above 0, not {self.weight}; leave out a corpus that is not used")
        for field in self.paths:
            if not getattr(self, field):
                raise SpecError(field, "is empty; name a file")

    @abstractmethod
    def records(self) -> Iterator[tuple[str, ...]]:
        """Yield the training examples in the order of the files, which are read lazily."""

    def files(self) -> tuple[str, ...]:
        """Return the names of the files that are read."""
        return tuple(getattr(self, field) for field in self.paths)

    def remarks(self) -> list[str]:
        """Return warnings about the content of the files. Default: none."""
        return []

    def absolute(self: C, folder: str = "") -> C:
        """Return the corpus with absolute paths. Relative paths start at `folder`. Default: the working directory."""
        paths = {field: os.path.abspath(os.path.join(folder, getattr(self, field))) for field in self.paths}
        return replace(self, **paths)  # type: ignore[type-var]  # every concrete spec is a dataclass


@dataclass(frozen=True, slots=True)
class ParallelFiles(Corpus):
    """A source file and a target file: line n of the target file is the translation of line n of the source file."""

    kind = "parallel"
    texts = 2
    paths = ("source", "target")
    source: str
    target: str
    weight: float = 1.0

    def records(self) -> Iterator[tuple[str, str]]:
        sides = lines(self.source), lines(self.target)
        for before, (source, target) in enumerate(zip_longest(*sides)):
            if source is None or target is None:
                longer = before + 1 + sum(1 for _ in sides[source is None])
                counts = (before, longer) if source is None else (longer, before)
                raise DataError(
                    f"{self.source} has {counts[0]} lines but {self.target} has {counts[1]}; "
                    "line n of one must be the translation of line n of the other"
                )
            yield source, target


@dataclass(frozen=True, slots=True)
class TSV(Corpus):
    """A file of tab-separated columns, two of which are the source and the target. Columns are counted from 1."""

    kind = "tsv"
    texts = 2
    path: str
    source_column: int = 1
    target_column: int = 2
    header: bool = False  # skip the first line, which names the columns
    weight: float = 1.0

    def check(self) -> None:
        Corpus.check(self)
        _check_columns(source_column=self.source_column, target_column=self.target_column)

    def records(self) -> Iterator[tuple[str, str]]:
        columns = self.source_column, self.target_column
        for cells, where in _rows(self.path, self.header):
            yield _columns(cells, *columns, where)

    def remarks(self) -> list[str]:
        return _unused(self.path, self.source_column, self.target_column)


@dataclass(frozen=True, slots=True)
class JSONL(Corpus):
    """A file with one JSON object per line, two of whose fields are the source and the target.

    A dot in a field name selects a field of a nested object, for example `translation.en`.
    """

    kind = "jsonl"
    texts = 2
    path: str
    source: str = "source"
    target: str = "target"
    weight: float = 1.0

    def records(self) -> Iterator[tuple[str, str]]:
        for record, where in _objects(self.path):
            yield _field(record, self.source, where), _field(record, self.target, where)


@dataclass(frozen=True, slots=True)
class Lines(Corpus):
    """A file with one text per line. If `field` is given, each line is a JSON object with the text in that field."""

    kind = "lines"
    texts = 1
    path: str
    field: str | None = None
    weight: float = 1.0

    def check(self) -> None:
        Corpus.check(self)
        name = self.path.lower()
        if self.field is None and any(name.endswith(f".jsonl{suffix}") for suffix in ("", *MAGIC)):
            raise SpecError("field", f"is missing; set it to the field of {self.path} that has the text")

    def records(self) -> Iterator[tuple[str]]:
        if self.field is None:
            for line in lines(self.path):
                yield (line,)
        else:
            for record, where in _objects(self.path):
                yield (_field(record, self.field, where),)


@dataclass(frozen=True, slots=True)
class Labelled(Corpus):
    """A file of tab-separated columns, two of which are the class label and the text. Columns are counted from 1.

    A line without a tab may be in fastText's format: `__label__sports The match was ...`.
    """

    kind = "labelled"
    texts = 2
    labelled = True
    path: str
    label_column: int = 1
    text_column: int = 2
    header: bool = False
    weight: float = 1.0

    def check(self) -> None:
        Corpus.check(self)
        _check_columns(label_column=self.label_column, text_column=self.text_column)
        if self.label_column == self.text_column:
            raise SpecError("text_column", f"is the column of the label, {self.label_column}; name another")

    def records(self) -> Iterator[tuple[str, str]]:
        columns = self.label_column, self.text_column
        for cells, where in _rows(self.path, self.header, fasttext=True):
            if len(cells) == 1 and cells[0].startswith(FASTTEXT):
                label, _, text = cells[0].partition(" ")
            else:
                label, text = _columns(cells, *columns, where)
            yield _label(label, text, where), text

    def remarks(self) -> list[str]:
        return _unused(self.path, self.label_column, self.text_column)


def _label(written: str, text: str, where: str) -> str:
    label = written.removeprefix(FASTTEXT)
    if not label:
        raise DataError(f"{where} has an empty label")
    if text.startswith(FASTTEXT) or (label != written and " " in label):
        raise DataError(f"{where} has several labels; give every line one label")
    return label


def _rows(path: str, header: bool, fasttext: bool = False) -> Iterator[tuple[list[str], str]]:
    """Yield (cells, place) for every line except the header; `place` is the file and line number for error messages.

    Lines with different numbers of cells are an error, because a tab inside a text would silently truncate the text.
    """
    first: tuple[int, int] | None = None  # line number and number of columns of the first line
    for number, line in enumerate(lines(path), 1):
        cells = line.split("\t")
        if not (fasttext and len(cells) == 1 and line.startswith(FASTTEXT)):
            first = first or (number, len(cells))
            if len(cells) != first[1]:
                raise DataError(
                    f"{path}: line {number} has {_counted(cells)} between tabs and line {first[0]} has {first[1]}; "
                    "remove tabs from the texts and give every line the same columns"
                )
        if number > 1 or not header:
            yield cells, f"{path}: line {number}"


def _unused(path: str, first: int, second: int) -> list[str]:
    """Return a list with a warning if the first line of a file has more columns than are used, else an empty list.

    A pipe is not checked, because it cannot be read again.
    """
    if is_pipe(path):
        return []
    count = next(lines(path)).count("\t") + 1
    if count <= 2:
        return []
    used = "the first two" if (first, second) == (1, 2) else f"columns {first} and {second}"
    return [f"warning: {path} has {count} columns between tabs; only {used} are read"]


def _check_columns(**columns: int) -> None:
    for field, column in columns.items():
        if column < 1:
            raise SpecError(field, f"must be at least 1, not {column}: columns are counted from 1")


def _columns(cells: list[str], first: int, second: int, where: str) -> tuple[str, str]:
    if len(cells) < max(first, second):
        raise DataError(f"{where} has {_counted(cells)} between tabs; column {max(first, second)} is missing")
    return cells[first - 1], cells[second - 1]


def _counted(cells: list[str]) -> str:
    return "1 column" if len(cells) == 1 else f"{len(cells)} columns"


def _objects(path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (JSON object, place) for every line; `place` is the file and line number for error messages."""
    for number, line in enumerate(lines(path), 1):
        where = f"{path}: line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON ({error})") from None
        if not isinstance(record, dict):
            raise DataError(f"{where} is not a JSON object; write one object in braces per line")
        yield record, where


def _field(record: dict[str, Any], key: str, where: str) -> str:
    """Return a string field of a JSON object. `key` is the field name, or names of nested fields joined by dots."""
    value: Any = record
    for name in (key,) if key in record else key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = nearest(name, value) if isinstance(value, Mapping) else "its parent is not an object"
            raise DataError(f"{where} has no field {key!r}; {known}")
        value = value[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: field {key!r} needs a string, not {_kind_of(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: field {key!r} has half a character (a lone surrogate); repair the text") from None
    return value


def _kind_of(value: Any) -> str:
    """Return a description of a JSON value for an error message.

    A list or an object is described by its type, because the repr of a deeply nested value may not be computable.
    """
    names = {dict: "an object", list: "a list", bool: "true or false", NoneType: "null"}
    return names.get(type(value)) or f"{value!r}"[:40]
