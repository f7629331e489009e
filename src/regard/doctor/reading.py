"""Read training text tolerantly: invalid lines are recorded and replaced instead of raising an error."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from regard.data.objectives import Objective
from regard.data.text import (
    BYTE_ORDER_MARK,
    FASTTEXT,
    JSONL,
    TSV,
    Corpus,
    Labelled,
    Lines,
    ParallelFiles,
    check_file,
    is_pipe,
    raw_lines,
)
from regard.errors import DataError

MOST = 2_000_000  # number of lines of a file that are examined; of a longer file, the first lines
RECORDED = 1000  # number of faulty lines of a file that are recorded


@dataclass
class TextFile:
    """The lines of a text file, and the problems of its bytes."""

    path: str
    lines: list[str] = field(default_factory=list)
    count: int = 0  # number of lines, including those that are not examined
    invalid: list[tuple[int, int, str]] = field(default_factory=list)  # (line, position, bytes around the error)
    invalid_count: int = 0
    byte_order_mark: bool = False
    returns: int = 0  # number of lines that end in a carriage return and a line feed
    broken: str = ""  # why the rest of the file cannot be read


@dataclass
class Part:
    """The examples of one corpus, as columns of texts. `files` is one file, or the two files of a parallel corpus."""

    files: tuple[str, ...]
    columns: dict[str, list[str]]  # may be of unequal length if the files are
    lines: Sequence[int]  # line number of each example
    malformed: list[tuple[int, str]] = field(default_factory=list)  # (line number, what is wrong with its format)
    counts: tuple[int, ...] = ()  # number of lines of each file

    @property
    def size(self) -> int:
        """Number of complete examples."""
        return min(map(len, self.columns.values()))


@dataclass
class Examples:
    """The examples of all training files, or of all validation files."""

    name: str  # "training text" or "validation text"
    parts: list[Part]
    files: list[TextFile]

    @cached_property
    def columns(self) -> dict[str, list[str]]:
        """The texts of all complete examples by column."""
        names = self.parts[0].columns
        return {name: [text for part in self.parts for text in part.columns[name][: part.size]] for name in names}

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.size)
        return starts

    @property
    def size(self) -> int:
        return self._starts[-1]

    @property
    def examined(self) -> str:
        """A sentence that states which part of the text is examined, or an empty string if it is the whole text."""
        cut = [file for file in self.files if file.count > len(file.lines) and not file.broken]
        names = " and ".join(dict.fromkeys(file.path for file in cut))
        return f"only the first {MOST:,} lines of {names} are examined" if cut else ""

    def line(self, example: int) -> int:
        """Return the line number of an example in its file."""
        part = bisect_right(self._starts, example) - 1
        return self.parts[part].lines[example - self._starts[part]]

    def place(self, example: int, column: int = 0) -> str:
        """Return the file and the line number of an example, such as "train.en: line 12"."""
        part = self.parts[bisect_right(self._starts, example) - 1]
        return f"{part.files[min(column, len(part.files) - 1)]}: line {self.line(example):,}"

    def record(self, example: int) -> tuple[str, ...]:
        """Return the texts of an example."""
        return tuple(column[example] for column in self.columns.values())


def read_file(path: str) -> TextFile:
    """Read the lines of a text file. Invalid bytes are decoded as Windows-1252, and recorded."""
    if is_pipe(path):
        raise DataError(f"{path}: is a pipe, and the doctor reads the text several times; write it into a file")
    check_file(path)
    file = TextFile(path)
    try:
        for raw in raw_lines(path):
            file.count += 1
            if file.count <= MOST:
                file.lines.append(_decoded(file, raw))
    except DataError as error:
        file.broken = error.args[0]
    return file


def _decoded(file: TextFile, raw: bytes) -> str:
    if file.count == 1 and raw.startswith(BYTE_ORDER_MARK):
        file.byte_order_mark = True
        raw = raw[len(BYTE_ORDER_MARK) :]
    if raw.endswith(b"\n"):
        file.returns += raw.endswith(b"\r\n")
        raw = raw[: -2 if raw.endswith(b"\r\n") else -1]
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        file.invalid_count += 1
        # The valid parts are UTF-8; each other byte becomes a lone surrogate, which is read as Windows-1252.
        text = _SURROGATE.sub(_replacement, raw.decode("utf-8", "surrogateescape"))
        if len(file.invalid) < RECORDED:
            file.invalid.append((file.count, error.start + 1, text))
        return text


_SURROGATE = re.compile("[\udc80-\udcff]")


def _replacement(match: re.Match[str]) -> str:
    return bytes([ord(match[0]) - 0xDC00]).decode("cp1252", "replace")


def read_examples(name: str, corpora: Sequence[Corpus], objective: Objective) -> Examples:
    """Read the examples of several corpora. The columns are named after the texts of the objective."""
    parts, files = [], []
    for corpus in corpora:
        read = _READERS.get(type(corpus), _other)
        part = read(corpus, files)
        part.columns = dict(zip(objective.texts, part.columns.values(), strict=True))
        parts.append(part)
    return Examples(name, parts, files)


def _parallel(corpus: Any, files: list[TextFile]) -> Part:
    source, target = read_file(corpus.source), read_file(corpus.target)
    files += [source, target]
    columns = {"source": source.lines, "target": target.lines}
    lines = range(1, 1 + max(len(source.lines), len(target.lines)))
    return Part((source.path, target.path), columns, lines, counts=(source.count, target.count))


def _lines(corpus: Any, files: list[TextFile]) -> Part:
    file = read_file(corpus.path)
    files.append(file)
    if corpus.field is None:
        return Part((file.path,), {"text": file.lines}, range(1, 1 + len(file.lines)), counts=(file.count,))
    return _parsed(file, ("text",), lambda line: (_value(json.loads(line), corpus.field),))


def _jsonl(corpus: Any, files: list[TextFile]) -> Part:
    file = read_file(corpus.path)
    files.append(file)

    def parse(line: str) -> tuple[str, ...]:
        record = json.loads(line)
        return _value(record, corpus.source), _value(record, corpus.target)

    return _parsed(file, ("source", "target"), parse)


def _value(record: Any, key: str) -> str:
    for name in key.split("."):
        if not isinstance(record, dict) or name not in record:
            raise ValueError(f"has no field {key!r}")
        record = record[name]
    if not isinstance(record, str):
        raise TypeError(f"its field {key!r} is not a text")
    return record


def _tsv(corpus: Any, files: list[TextFile]) -> Part:
    file = read_file(corpus.path)
    files.append(file)
    return _table(file, ("source", "target"), (corpus.source_column, corpus.target_column), corpus.header)


def _labelled(corpus: Any, files: list[TextFile]) -> Part:
    file = read_file(corpus.path)
    files.append(file)
    columns = (corpus.label_column, corpus.text_column)
    return _table(file, ("label", "text"), columns, corpus.header, fasttext=True)


def _table(
    file: TextFile, names: tuple[str, str], columns: tuple[int, int], header: bool, fasttext: bool = False
) -> Part:
    """Return the examples of a tab-separated file. A line with another number of columns than usual is malformed."""
    widths: dict[int, int] = {}
    for line in file.lines[int(header) :]:
        tabs = line.count("\t")
        widths[tabs] = widths.get(tabs, 0) + 1
    usual = max(widths, key=lambda tabs: widths[tabs], default=0) + 1

    def parse(line: str) -> tuple[str, ...]:
        cells = line.split("\t")
        if fasttext and len(cells) == 1 and line.startswith(FASTTEXT):
            label, _, text = line.partition(" ")
            return label.removeprefix(FASTTEXT), text
        if len(cells) != usual:
            raise ValueError(f"has {len(cells)} columns between tabs, where most lines have {usual}")
        if len(cells) < max(columns):
            raise ValueError(f"has {len(cells)} columns between tabs; column {max(columns)} is missing")
        first, second = cells[columns[0] - 1], cells[columns[1] - 1]
        return (first.removeprefix(FASTTEXT) if fasttext else first), second

    return _parsed(file, names, parse, skip=int(header))


def _parsed(file: TextFile, names: tuple[str, ...], parse: Callable[[str], tuple[str, ...]], skip: int = 0) -> Part:
    """Return the examples in the lines of a file. Lines for which `parse` raises an error are listed as malformed."""
    records, numbers, malformed = list[tuple[str, ...]](), list[int](), list[tuple[int, str]]()
    for number, line in enumerate(file.lines[skip:], skip + 1):
        try:
            records.append(parse(line))
            numbers.append(number)
        except json.JSONDecodeError as error:
            malformed.append((number, f"is not JSON ({error})"))
        except (ValueError, TypeError, RecursionError) as error:
            malformed.append((number, str(error) or "is nested too deeply"))
    columns = {name: [record[i] for record in records] for i, name in enumerate(names)}
    return Part((file.path,), columns, numbers, malformed, (file.count,))


def _other(corpus: Corpus, files: list[TextFile]) -> Part:  # noqa: ARG001  # a corpus of the user reads its own files
    records = list(corpus.records())
    columns = {str(i): [record[i] for record in records] for i in range(corpus.texts)}
    return Part(corpus.files() or (type(corpus).kind,), columns, range(1, 1 + len(records)))


_READERS: dict[type[Corpus], Callable[[Any, list[TextFile]], Part]] = {
    ParallelFiles: _parallel,
    TSV: _tsv,
    JSONL: _jsonl,
    Lines: _lines,
    Labelled: _labelled,
}
