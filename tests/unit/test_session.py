"""Training in a folder: what is not ours there is left alone."""

from pathlib import Path

import pytest

from regard.errors import DataError
from regard.recipe import asked
from regard.session import begin


@pytest.mark.parametrize("lock", ["", "of another program"])
def test_training_that_is_refused_removes_nothing(tmp_path: Path, lock: str) -> None:
    text, folder = tmp_path / "text.tsv", tmp_path / "folder"
    text.write_text("a\tb\n")
    folder.mkdir()
    wanted = asked({"data": {"train": [{"kind": "tsv", "path": str(text)}]}})
    names = {".lock": lock, ".saving": "precious", ".photos-making": "precious", "thesis.tex": "precious"}
    for name, content in names.items():
        (folder / name).write_text(content)
    for _ in range(2):
        with pytest.raises(DataError, match=r"exists; .*choose another folder"):
            begin(wanted, folder)
        left = {path.name: path.read_text() for path in folder.iterdir() if path.name != "asked.json"}
        assert left == names or (not lock and left == {name: names[name] for name in names if name != ".lock"})
        (folder / "asked.json").write_text("{}")  # now it looks like a run
