"""The token store: tables round-trip through disk, and damaged files are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from regard.data.token_store import MANIFEST, Column, Table, Writer, chunks
from regard.errors import DataError

SOURCE = [[5, 6, 7], [8], [9, 10, 11, 12]]
TARGET = [[1, 5, 2], [1, 2], [1, 7, 8, 9, 2]]


def rows_of(table: Table, column: str) -> list[list[int]]:
    return [table[column][row].tolist() for row in range(table.rows)]


def written(folder: Path, vocab: int = 20) -> Table:
    writer = Writer(folder, ("source", "target"), vocab)
    writer.add(Table.of(source=SOURCE[:1], target=TARGET[:1]))
    writer.add(Table.of(source=[], target=[]))
    writer.add(Table.of(source=SOURCE[1:], target=TARGET[1:]))
    return writer.close()


@pytest.mark.parametrize(("vocab", "dtype"), [(20, "<u2"), (2**16, "<u2"), (2**16 + 1, "<u4")])
def test_ids_round_trip_through_disk(tmp_path: Path, vocab: int, dtype: str) -> None:
    largest = [vocab - 1, 0]
    writer = Writer(tmp_path, ("source", "target"), vocab)
    writer.add(Table.of(source=[largest, SOURCE[2]], target=[TARGET[0], [4]]))
    for table in (writer.close(), Table.open(tmp_path)):
        assert table["source"][0].dtype == np.dtype(dtype)
        assert rows_of(table, "source") == [largest, SOURCE[2]]
        assert rows_of(table, "target") == [TARGET[0], [4]]


def test_rows_may_be_written_in_chunks(tmp_path: Path) -> None:
    table = written(tmp_path)
    assert (table.rows, len(table["source"])) == (3, 3)
    assert rows_of(table, "source") == SOURCE
    assert rows_of(table, "target") == TARGET
    assert table["source"].lengths.tolist() == [3, 1, 4]
    assert table["target"].lengths.tolist() == [3, 2, 5]


def test_ids_are_memory_mapped(tmp_path: Path) -> None:
    assert isinstance(written(tmp_path)["source"].ids, np.memmap)


def test_table_in_memory_equals_the_table_on_disk(tmp_path: Path) -> None:
    disk, memory = written(tmp_path), Table.of(source=SOURCE, target=TARGET)
    for name in ("source", "target"):
        assert rows_of(memory, name) == rows_of(disk, name)
        assert memory[name].offsets.tolist() == disk[name].offsets.tolist()


def test_an_empty_sequence_keeps_its_row(tmp_path: Path) -> None:
    writer = Writer(tmp_path, ("target",), 20)
    writer.add(Table.of(target=[[], [3], []]))
    assert rows_of(writer.close(), "target") == [[], [3], []]
    assert rows_of(Table.of(target=[[], [3], []]), "target") == [[], [3], []]


def test_empty_table(tmp_path: Path) -> None:
    Writer(tmp_path, ("source", "target"), 20).close()
    for table in (Table.open(tmp_path), Table.of(source=[], target=[])):
        assert table.rows == 0
        assert table["target"].lengths.tolist() == []
        assert len(table["target"].ids) == 0


def test_stream_is_one_row(tmp_path: Path) -> None:
    writer = Writer(tmp_path, ("target",), 20, stream=True)
    writer.add(Table.of(target=[[4, 5], [6]]))
    writer.add(Table.of(target=[[7, 8, 9]]))
    table = writer.close()
    assert rows_of(table, "target") == [[4, 5, 6, 7, 8, 9]]
    assert table["target"].offsets.tolist() == [0, 6]


def test_an_empty_stream_is_one_empty_row(tmp_path: Path) -> None:
    table = Writer(tmp_path, ("target",), 20, stream=True).close()
    assert (table.rows, table["target"].lengths.tolist()) == (1, [0])


def test_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path, ("target",), 20)
    with pytest.raises(OverflowError):
        writer.add(Table.of(target=[[5], [2**16]]))
    writer.close()


def columns(folder: Path) -> list[Column]:
    return [written(folder)["source"], Column.of(SOURCE)]


def as_lists(column: Column) -> list[list[int]]:
    assert column.offsets.dtype == np.int64
    return [column[row].tolist() for row in range(len(column))]


def test_take_accepts_any_order(tmp_path: Path) -> None:
    for column in columns(tmp_path):
        assert as_lists(column.take(np.asarray([2, 0, 2]))) == [SOURCE[2], SOURCE[0], SOURCE[2]]
        assert as_lists(column.take(np.zeros(0, np.int64))) == []
    table = Table.of(source=SOURCE, target=TARGET).take(np.asarray([1]))
    assert (rows_of(table, "source"), rows_of(table, "target")) == ([SOURCE[1]], [TARGET[1]])


def test_spans_may_have_any_position(tmp_path: Path) -> None:
    for column in columns(tmp_path):
        spans = column.spans(np.asarray([1, 0, 5, 8]), np.asarray([3, 0, 8, 8]))
        assert as_lists(spans) == [[6, 7], [], [10, 11, 12], []]


def test_between_adds_ids_before_and_after(tmp_path: Path) -> None:
    for column in (*columns(tmp_path), Column.of([[], [4], []])):
        lists = as_lists(column)
        assert as_lists(column.between((1,), (2, 3))) == [[1, *row, 2, 3] for row in lists]
        assert as_lists(column.between((), (70000,))) == [[*row, 70000] for row in lists]
        assert as_lists(column.between((9, 8), ())) == [[9, 8, *row] for row in lists]
    assert as_lists(Column.of([]).between((1,), (2,))) == []


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataError, match=r"different numbers of rows: \[1, 2\]"):
        Table.of(source=[[1]], target=[[1], [2]])


def test_table_without_manifest_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "killed", ("target",), 20)
    writer.add(Table.of(target=[[1, 2]]))
    with pytest.raises(DataError, match="not a token store"):
        Table.open(tmp_path / "killed")
    writer.close()
    Table.open(tmp_path / "killed")
    with pytest.raises(DataError, match="prepare the data again"):
        Table.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "{}", "\xff"),
        *('{"columns": []}', '{"columns": {}}', '{"columns": {"source": {}}}', '{"columns": {"source": 3}}'),
        '{"columns": {"source": {"dtype": "<x9", "rows": 3, "ids": 8}}}',
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    written(tmp_path)
    (tmp_path / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError):
        Table.open(tmp_path)


@pytest.mark.parametrize("name", ["source.ids", "source.offsets", "target.ids", "target.offsets"])
@pytest.mark.parametrize("end", [-1, -2, -8, 0])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str, end: int) -> None:
    written(tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:end])
    with pytest.raises(DataError, match="prepare the data again") as raised:
        Table.open(tmp_path)
    assert str(raised.value).count("prepare the data again") == 1


@pytest.mark.parametrize("name", ["source.ids", "target.offsets"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    written(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match="prepare the data again"):
        Table.open(tmp_path)


def test_a_file_that_grew_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    with open(tmp_path / "source.ids", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match="prepare the data again"):
        Table.open(tmp_path)


@pytest.mark.parametrize("offsets", [[0, 3, 4, 9], [1, 3, 4, 8], [0, 4, 3, 8]])
def test_offsets_outside_the_ids_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    written(tmp_path)
    (tmp_path / "source.offsets").write_bytes(np.asarray(offsets, "<i8").tobytes())
    with pytest.raises(DataError, match="prepare the data again"):
        Table.open(tmp_path)


def test_rows_missing_in_all_columns_are_detected(tmp_path: Path) -> None:
    written(tmp_path)
    for name, ids in (("source", 4), ("target", 5)):
        for path, size in ((tmp_path / f"{name}.offsets", 3 * 8), (tmp_path / f"{name}.ids", ids * 2)):
            path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match="source has 2 rows of 4 ids instead of 3 of 8"):
        Table.open(tmp_path)


def test_manifest_lists_the_columns(tmp_path: Path) -> None:
    written(tmp_path)
    about = json.loads((tmp_path / MANIFEST).read_text())["columns"]
    assert {name: (a["rows"], a["ids"]) for name, a in about.items()} == {"source": (3, 8), "target": (3, 10)}
    assert about["source"]["sha256"] != about["target"]["sha256"]


@pytest.mark.parametrize(
    ("count", "sizes"), [(0, []), (1, [1]), (2, [2]), (3, [3]), (4, [3, 1]), (6, [3, 3]), (7, [3, 3, 1])]
)
def test_chunks_keep_all_items_in_order(count: int, sizes: list[int]) -> None:
    pieces = list(chunks(iter(range(count)), 3))
    assert [len(chunk) for chunk in pieces] == sizes
    assert [item for chunk in pieces for item in chunk] == list(range(count))


def test_vectors_round_trip_through_disk(tmp_path: Path) -> None:
    rows = [[[0.5, 1.0], [2.0, -3.0]], [], [[4.0, 5.0]]]
    with Writer(tmp_path, ("text", "label"), 3) as writer:
        for part in (rows[:2], rows[2:]):
            labels = Column.of([[1]] * len(part))
            writer.add(Table({"text": Column.of_vectors(part, 2), "label": labels}))
        table = writer.close()
    assert [table["text"][row].tolist() for row in range(3)] == rows
    assert table["text"].lengths.tolist() == [2, 0, 1]
    assert table["text"].take(np.asarray([2, 0]))[1].tolist() == rows[0]
    assert rows_of(table, "label") == [[1], [1], [1]]


def test_vectors_need_their_number_of_channels() -> None:
    with pytest.raises(DataError, match="record 2: every vector needs 2 numbers"):
        Column.of_vectors([[[1.0, 2.0]], [[1.0]]], 2)
