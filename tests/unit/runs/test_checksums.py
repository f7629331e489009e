"""Files that a run writes once are verified: a changed byte is an error that names the file and the way out."""

from pathlib import Path

import pytest

from regard.errors import DataError
from regard.runs.checksums import verify, write_checksums
from regard.training.checkpoint import RunFolder, json_text, read_json, write_json

RECIPE = {"model": {"d_model": 16}}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    write_json(run.request, {"a": 1})
    (tmp_path / "tokenizer.source.json").write_text("{}")
    (run.data / "train-0").mkdir(parents=True)
    (run.data / "train-0" / "source.ids").write_bytes(b"\x01\x02")
    write_checksums(run, json_text(RECIPE))
    write_json(run.recipe, RECIPE)
    return run


FILES = ("request.json", "recipe.json", "tokenizer.source.json", "data/train-0/source.ids")


def test_unchanged_files_are_accepted(folder: RunFolder) -> None:
    assert sorted(read_json(folder.checksums)) == sorted(FILES)
    verify(folder, *(folder.path / name for name in FILES), folder.data)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_named(folder: RunFolder, name: str) -> None:
    path = folder.path / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError) as error:
        verify(folder, folder.data if name.startswith("data") else path)
    assert str(error.value) == (
        f"{path} has changed since training began; restore it from a copy, or remove {folder.checksums} if you changed "
        "the file yourself"
    )
    folder.checksums.unlink()
    verify(folder, path, folder.data)


def test_files_without_a_checksum_are_accepted(folder: RunFolder) -> None:
    (folder.path / "log.jsonl").write_text("")
    verify(folder, folder.path / "log.jsonl", folder.path / "nowhere")
