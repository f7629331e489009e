import gzip
import json
import os
from pathlib import Path

import pytest

from regard.data.objectives import Classification, LanguageModelling, Translation
from regard.data.text import JSONL, TSV, Labelled, Lines, ParallelFiles
from regard.doctor.reading import read_examples, read_file
from regard.errors import DataError


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def test_invalid_bytes_are_recorded_and_read_as_windows_1252(tmp_path: Path) -> None:
    file = read_file(write(tmp_path / "a", "größer\n".encode() + b"gr\xfcn \xc3\xbc\nend".replace(b"end", b"last")))
    assert file.lines == ["größer", "grün ü", "last"]
    assert [(line, position) for line, position, _ in file.invalid] == [(2, 3)]
    assert file.count == 3


def test_byte_order_mark_and_carriage_returns_are_removed(tmp_path: Path) -> None:
    file = read_file(write(tmp_path / "a", b"\xef\xbb\xbfone\r\ntwo\n"))
    assert file.lines == ["one", "two"]
    assert file.byte_order_mark
    assert file.returns == 1


def test_a_file_that_breaks_off_keeps_the_lines_before(tmp_path: Path) -> None:
    assert "NUL" in read_file(write(tmp_path / "a", b"one\n" + "two\n".encode("utf-16-le"))).broken
    data = gzip.compress(os.urandom(3000).hex().encode() + b"\n")
    file = read_file(write(tmp_path / "b.gz", data[: len(data) // 2]))
    assert "cut short" in file.broken


def test_a_missing_file_and_a_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_file(str(tmp_path / "none"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is a pipe"):
        read_file(str(tmp_path / "pipe"))


def test_parallel_files_of_unequal_length_are_read_to_the_end(tmp_path: Path) -> None:
    corpus = ParallelFiles(write(tmp_path / "a", b"1\n2\n3\n"), write(tmp_path / "b", b"x\ny\n"))
    examples = read_examples("training text", [corpus], Translation())
    assert examples.parts[0].counts == (3, 2)
    assert examples.columns == {"source": ["1", "2"], "target": ["x", "y"]}


def test_rows_with_other_columns_are_malformed_and_numbered(tmp_path: Path) -> None:
    corpus = TSV(write(tmp_path / "a.tsv", b"a\tb\nc\nd\te\n"))
    examples = read_examples("training text", [corpus], Translation())
    assert examples.columns["source"] == ["a", "d"]
    assert examples.parts[0].malformed == [(2, "has 1 columns between tabs, where most lines have 2")]
    assert examples.place(1).endswith("a.tsv: line 3")


def test_places_of_several_files(tmp_path: Path) -> None:
    corpora = [TSV(write(tmp_path / name, b"a\tb\nc\td\n")) for name in ("one", "two")]
    examples = read_examples("training text", corpora, Translation())
    assert examples.size == 4
    assert examples.place(3).endswith("two: line 2")
    assert examples.record(2) == ("a", "b")


def test_json_lines_without_a_field_are_malformed(tmp_path: Path) -> None:
    lines = [json.dumps({"source": "a", "target": "b"}), "{", json.dumps({"source": "a"}), json.dumps([1])]
    corpus = JSONL(write(tmp_path / "a.jsonl", "\n".join(lines).encode()))
    part = read_examples("training text", [corpus], Translation()).parts[0]
    assert part.size == 1
    assert [line for line, _ in part.malformed] == [2, 3, 4]


def test_labels_in_both_formats(tmp_path: Path) -> None:
    corpus = Labelled(write(tmp_path / "a", b"good\tfine\n__label__bad not so fine\n"))
    columns = read_examples("training text", [corpus], Classification()).columns
    assert columns == {"label": ["good", "bad"], "text": ["fine", "not so fine"]}


def test_lines_are_one_column(tmp_path: Path) -> None:
    corpus = Lines(write(tmp_path / "a", b"one\ntwo\n"))
    assert read_examples("training text", [corpus], LanguageModelling()).columns == {"target": ["one", "two"]}
