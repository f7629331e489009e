"""Text files: line ends, refused files, and the examples of every corpus."""

import gzip
import io
import json
import lzma
import os
import random
import re
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from regard.data import text
from regard.data.text import JSONL, TSV, Corpus, Labelled, Lines, ParallelFiles, check_file, decoded_lines, lines
from regard.errors import DataError, SpecError
from regard.tree import read, to_record

PACKERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def written(folder: Path, content: bytes | str, name: str = "text.txt") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def refusal(path: str | Corpus) -> str:
    """The error message for a refused file, which is one line with the name of the file."""
    with pytest.raises(DataError) as caught:
        list(lines(path) if isinstance(path, str) else path.records())
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert all(name in sentence for name in ([path] if isinstance(path, str) else path.files()))
    return sentence


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\nb", ["a", "b"]),
        ("a", ["a"]),
        ("\n", [""]),
        ("\n\n", ["", ""]),
        ("a\n\n", ["a", ""]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\r\r\nb\r", ["a\r", "b\r"]),
        ("a\rb\u2028c\u2029d\x85e\x0bf\x0cg\x1ch\x1di\x1ej\n", ["a\rb\u2028c\u2029d\x85e\x0bf\x0cg\x1ch\x1di\x1ej"]),
        ("\ufeffa\n\ufeffb\n", ["a", "\ufeffb"]),
        ("\ufeff\n", [""]),
        ("  \u00e9 e\u0301 \U0001f469\u200d\U0001f467\t\n", ["  \u00e9 e\u0301 \U0001f469\u200d\U0001f467\t"]),
    ],
)
def test_only_a_line_feed_ends_a_line(tmp_path: Path, content: str, expected: list[str], suffix: str) -> None:
    assert list(lines(written(tmp_path, PACKERS[suffix](content.encode()), f"text.txt{suffix}"))) == expected


def test_lines_may_span_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a character nor a line end is broken at the end of a chunk."""
    content = ["\u00e9" * n + "\r" for n in range(12)] + ["x" * 8, "y" * 7]
    path = written(tmp_path, "\n".join(content) + "\n")
    for size in (1, 2, 3, 8, 1 << 20):
        monkeypatch.setattr(text, "CHUNK", size)
        assert list(lines(path)) == [line.removesuffix("\r") for line in content]


def test_lines_accepts_a_path(tmp_path: Path) -> None:
    assert list(lines(Path(written(tmp_path, "a\n", "TEXT.TXT")))) == ["a"]
    assert list(lines(Path(written(tmp_path, gzip.compress(b"a\n") + gzip.compress(b"b\n"), "t.GZ")))) == ["a", "b"]


def test_unreadable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file" in refusal(str(tmp_path / "nothing.txt"))
    assert "is a folder" in refusal(str(tmp_path))
    for suffix in ("", ".gz", ".xz"):
        assert "is empty" in refusal(written(tmp_path, b"", f"empty{suffix}"))
        assert "is empty" in refusal(written(tmp_path, PACKERS[suffix](b""), f"inside{suffix}"))
    assert "is empty" in refusal(written(tmp_path, "\ufeff"))
    with pytest.raises(DataError, match="cannot be opened"):
        list(lines("a\0b"))
    with pytest.raises(DataError, match="cannot be opened"):
        list(lines("a" * 5000))

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path, "a\n")
    monkeypatch.setattr(Path, "open", forbidden)  # file modes do not stop root
    assert "permission denied" in refusal(path)


def test_invalid_utf8_is_reported_with_its_position(tmp_path: Path) -> None:
    sentence = refusal(written(tmp_path, b"one\ntwo\ncaf\xe9 au lait\n"))
    assert "line 3 " in sentence
    assert "0xe9" in sentence
    assert "position 4 " in sentence
    for wrong in (b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80\x80\x80", b"\xe2\x82", b"\x80"):
        assert "line 2 is not text" in refusal(written(tmp_path, b"fine\n" + wrong + b"\n"))
    assert "0xff" in refusal(written(tmp_path, "\u4e2d".encode("utf-16")))


def test_binary_files_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    safetensors = struct.pack("<Q", len(header)) + header + bytes(8)
    picture = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(13)
    for content in (safetensors, picture, bytes(5000), "plain".encode("utf-16")):
        assert "line 1 is not text" in refusal(written(tmp_path, content))
    assert "line 3 is not text" in refusal(written(tmp_path, b"a\nb\nc\0d\n"))


def test_binary_file_without_line_feeds_is_refused_at_its_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CHUNK", 1000)
    stream = io.BytesIO(b"\0" * 1_000_000)
    with pytest.raises(DataError, match="line 1 is not text"):
        next(decoded_lines(stream, "zeros"))
    assert stream.tell() == 1000


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_suffix_and_compression_must_agree(tmp_path: Path, suffix: str) -> None:
    sentences = [f"{number} {random.Random(number).random()}" for number in range(3000)]
    packed = PACKERS[suffix]("\n".join(sentences).encode())
    assert list(lines(written(tmp_path, packed, f"good{suffix}"))) == sentences
    assert f"ends in {suffix} but is not a {suffix} file" in refusal(written(tmp_path, "plain\n", f"plain{suffix}"))
    assert f"rename it to end in {suffix}" in refusal(written(tmp_path, packed, "renamed.txt"))
    other = {".gz": ".xz", ".xz": ".gz"}[suffix]
    assert "rename it" in refusal(written(tmp_path, packed, f"swapped{other}"))
    for cut in (8, len(packed) // 2, len(packed) - 3):
        assert "damaged or cut short" in refusal(written(tmp_path, packed[:cut], f"cut{suffix}"))
    broken = bytearray(packed)
    broken[len(packed) // 2] ^= 0xFF
    # Whatever the effect of the damage, it is reported.
    with pytest.raises(DataError):
        list(lines(written(tmp_path, bytes(broken), f"broken{suffix}")))


def test_damaged_file_is_reported_with_its_line(tmp_path: Path) -> None:
    squeeze = zlib.compressobj(wbits=31)
    packed = squeeze.compress(b"one\ntwo\n") + squeeze.flush(zlib.Z_SYNC_FLUSH)
    assert "cut short: line 3 cannot be read" in refusal(written(tmp_path, packed, "cut.gz"))
    # A block of a type that deflate does not have.
    assert "damaged or cut short: line 1 cannot be read" in refusal(written(tmp_path, packed + b"\x07" * 9, "wrong.gz"))
    assert "damaged" in refusal(written(tmp_path, gzip.compress(b"one\n") + b"garbage", "longer.gz"))


def test_files_are_read_lazily(tmp_path: Path) -> None:
    path = written(tmp_path, b"a\nb\n\xff\n")
    assert list(islice(lines(path), 2)) == ["a", "b"]


def test_stream_yields_each_line_when_it_is_complete() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as end:
        decoded = decoded_lines(stream, "standard input")
        for line in ("one", "two"):
            end.write(f"{line}\r\n".encode())
            assert next(decoded) == line
        end.write(b"\xff\n")
        with pytest.raises(DataError, match="standard input: line 3 is not text"):
            next(decoded)


def test_standard_input_and_pipes_can_be_read(tmp_path: Path) -> None:
    assert list(decoded_lines(io.BytesIO(b""), "standard input")) == []
    code = "from regard.data.text import lines; print(list(lines('/dev/stdin')))"
    process = subprocess.run([sys.executable, "-c", code], input=b"a\nb", capture_output=True, check=True)
    assert process.stdout.decode().strip() == "['a', 'b']"


def test_parallel_files_give_pairs(tmp_path: Path) -> None:
    source = written(tmp_path, "a\r\n\u2028\n\n", "x.en")
    target = written(tmp_path, gzip.compress("\u00e4\nb\x85\nc".encode()), "x.de.gz")
    corpus = ParallelFiles(source, target)
    assert list(corpus.records()) == [("a", "\u00e4"), ("\u2028", "b\x85"), ("", "c")]
    assert list(corpus.records()) == list(corpus.records()), "can be read again"


@pytest.mark.parametrize(("left", "right"), [(2, 3), (3, 2), (1, 7), (7, 1)])
def test_parallel_files_of_unequal_length_are_refused_with_their_counts(tmp_path: Path, left: int, right: int) -> None:
    corpus = ParallelFiles(written(tmp_path, "a\n" * left, "x.en"), written(tmp_path, "b\n" * right, "x.de"))
    sentence = refusal(corpus)
    assert f"{corpus.source} has {left} lines" in sentence
    assert f"{corpus.target} has {right}" in sentence


def test_tsv_gives_two_columns(tmp_path: Path) -> None:
    path = written(tmp_path, "id\ta b\t c\t\n2\t\td\tx\r\n")
    assert list(TSV(path).records()) == [("id", "a b"), ("2", "")]
    assert list(TSV(path, source_column=3, target_column=2).records()) == [(" c", "a b"), ("d", "")]
    assert "line 1 has 4 columns between tabs; column 5 is missing" in refusal(TSV(path, 1, 5))
    assert "line 2 has 1 column " in refusal(TSV(written(tmp_path, "a\tb\na b\n")))


def test_jsonl_gives_two_fields(tmp_path: Path) -> None:
    records = [{"source": "a\n\u2028", "target": "\u00e9", "translation": {"en": "x", "de": "y"}, "a.b": "dotted"}]
    path = written(tmp_path, "".join(json.dumps(record) + "\r\n" for record in records))
    assert list(JSONL(path).records()) == [("a\n\u2028", "\u00e9")]
    assert list(JSONL(path, "translation.en", "translation.de").records()) == [("x", "y")]
    assert list(JSONL(path, "a.b", "source").records()) == [("dotted", "a\n\u2028")]
    assert "has no field 'sauce'; did you mean 'source'?" in refusal(JSONL(path, source="sauce"))
    assert "has no field 'translation.fr'" in refusal(JSONL(path, source="translation.fr"))
    assert "has no field 'source.en'" in refusal(JSONL(path, source="source.en"))
    assert "needs a string" in refusal(JSONL(path, source="translation"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "is not JSON"),
        ("{'source': 1}", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ('{"source": 1, "target": ""}', "needs a string, not 1"),
        ('{"source": null, "target": ""}', "needs a string, not null"),
        ('{"source": "\\ud83d", "target": ""}', "half a character"),
        ('{"target": ""}', "has no field 'source'"),
        ("[" * 200_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
    ],
    ids=range(10),
)
def test_invalid_jsonl_lines_are_refused(tmp_path: Path, line: str, message: str) -> None:
    fine = '{"source": "\\ud83d\\ude00", "target": ""}\n'
    sentence = refusal(JSONL(written(tmp_path, fine + line + "\n")))
    assert re.search(r"line 2\b", sentence)
    assert message in sentence


def test_lines_corpus_gives_lines_or_a_json_field(tmp_path: Path) -> None:
    assert list(Lines(written(tmp_path, "a\tb\n\nc")).records()) == [("a\tb",), ("",), ("c",)]
    packed = written(tmp_path, gzip.compress(b'{"text": "a"}\n'), "x.jsonl.gz")
    assert list(Lines(packed, field="text").records()) == [("a",)]
    assert list(Lines(written(tmp_path, '{"o": {"t": "b"}}', "x.json"), field="o.t").records()) == [("b",)]
    assert "line 1 is not JSON" in refusal(Lines(written(tmp_path, "plain"), field="text"))
    for name in ("x.jsonl", "x.JSONL", "x.jsonl.gz", "x.jsonl.xz"):
        with pytest.raises(SpecError, match="field: is missing"):
            Lines(name)


def test_labelled_gives_labels_and_texts(tmp_path: Path) -> None:
    path = written(tmp_path, "good\ta b\nbad one\t\n__label__good  c d\n__label__bad\n__label__x\ty\n")
    expected = [("good", "a b"), ("bad one", ""), ("good", " c d"), ("bad", ""), ("x", "y")]
    assert list(Labelled(path).records()) == expected
    assert list(Labelled(written(tmp_path, "t\t1\tl\n"), label_column=3, text_column=1).records()) == [("l", "t")]
    assert "line 1 has 1 column" in refusal(Labelled(written(tmp_path, "no tab\n")))
    assert "line 1 has an empty label" in refusal(Labelled(written(tmp_path, "\tx\n")))
    assert "line 1 has an empty label" in refusal(Labelled(written(tmp_path, "__label__ x\n")))
    assert "several labels" in refusal(Labelled(written(tmp_path, "__label__a __label__b x\n")))
    assert "several labels" in refusal(Labelled(written(tmp_path, "__label__a some\ttext\n")))


def test_corpora_declare_their_texts_and_labels() -> None:
    corpora = [ParallelFiles("a", "b"), TSV("a"), JSONL("a"), Lines("a"), Labelled("a")]
    assert [(c.kind, c.texts, c.labelled) for c in corpora] == [
        ("parallel", 2, False),
        ("tsv", 2, False),
        ("jsonl", 2, False),
        ("lines", 1, False),
        ("labelled", 2, True),
    ]
    assert all(corpus.weight == 1.0 for corpus in corpora)


def test_corpora_round_trip_and_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    corpora = [ParallelFiles("a.en", "../b.de", 2.0), TSV("/x/t.tsv", 2, 1), Lines("l.jsonl", "text", 0.5)]
    absolute_files = [(f"{tmp_path}/a.en", f"{tmp_path.parent}/b.de"), ("/x/t.tsv",), (f"{tmp_path}/l.jsonl",)]
    parts = {part.kind: part for part in (ParallelFiles, TSV, JSONL, Lines, Labelled)}
    for corpus, files in zip(corpora, absolute_files, strict=True):
        assert read(json.loads(json.dumps(to_record(corpus))), Corpus, "", parts) == corpus
        moved = corpus.absolute()
        assert moved.files() == files
        assert moved.weight == corpus.weight
        assert moved.absolute("/elsewhere") == moved
    assert corpora[0].absolute("/data").files() == ("/data/a.en", "/b.de")
    assert corpora[0].files() == ("a.en", "../b.de")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Lines("a", weight=0.0), "weight"),
        (lambda: TSV("a", weight=-1.0), "weight"),
        (lambda: JSONL("a", weight=float("inf")), "weight"),
        (lambda: Lines(""), "path"),
        (lambda: ParallelFiles("a", ""), "target"),
        (lambda: TSV("a", source_column=0), "source_column"),
        (lambda: TSV("a", target_column=-1), "target_column"),
        (lambda: Labelled("a", label_column=0), "label_column"),
        (lambda: Labelled("a", label_column=2), "text_column"),
    ],
)
def test_invalid_corpora_are_refused(make: Callable[[], Corpus], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.path == field


# -- endless lines, wrong numbers of columns, unreadable files


@pytest.mark.parametrize("name", ["text", "text.gz", "text.xz"])
def test_too_long_line_is_refused_in_bounded_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_LINE", 1 << 21)
    opened = {"text": open, "text.gz": gzip.open, "text.xz": lzma.open}[name]
    with opened(tmp_path / name, "wb") as file:
        file.write(b"short\n" + b"b" * (1 << 21) + b"\n")
        for _ in range(32):
            file.write(b"c" * (1 << 20))
    tracemalloc.start()
    iterator = lines(tmp_path / name)
    assert (next(iterator), len(next(iterator))) == ("short", 1 << 21)
    with pytest.raises(DataError, match="line 3 is longer than 2 MiB; break the text into lines"):
        next(iterator)
    assert tracemalloc.get_traced_memory()[1] < 24 << 20
    tracemalloc.stop()


def test_too_long_line_of_a_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_LINE", 5)
    assert list(decoded_lines(io.BytesIO(b"12345\n12345"), "standard input")) == ["12345", "12345"]
    for content in (b"1\n123456\n", b"1\n123456"):
        with pytest.raises(DataError, match="standard input: line 2 is longer than 5 bytes"):
            list(decoded_lines(io.BytesIO(content), "standard input"))


def test_lines_with_other_numbers_of_columns_are_refused(tmp_path: Path) -> None:
    for content in ("a\tb\nc\td\te\n", "a\tb\tc\nd\te\n"):
        assert "columns between tabs and line 1 has" in refusal(TSV(written(tmp_path, content)))
    mixed = written(tmp_path, "__label__x one text\ny\tanother\n__label__x the third\n")
    assert [label for label, _ in Labelled(mixed).records()] == ["x", "y", "x"]


def test_unused_columns_are_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, "a\tb\tc\n")
    assert TSV(path).remarks() == [f"warning: {path} has 3 columns between tabs; only the first two are read"]
    assert "only columns 3 and 1 are read" in TSV(path, 3, 1).remarks()[0]
    assert TSV(written(tmp_path, "a\tb\n")).remarks() == []


def test_check_file_does_not_read_the_file(tmp_path: Path) -> None:
    check_file(written(tmp_path, "a\n"))
    for path, message in ((str(tmp_path), "is a folder"), (str(tmp_path / "no"), "no such file")):
        with pytest.raises(DataError, match=message):
            check_file(path)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        check_file(str(tmp_path / "empty"))
    os.mkfifo(tmp_path / "pipe")
    check_file(str(tmp_path / "pipe"))  # not opened: it would wait for a writer
