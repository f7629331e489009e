"""The folder of an ablation: it is locked, links are not followed, and other files are kept."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from regard.ablation import demo, experiment
from regard.ablation.experiment import Settings, open_ablation
from regard.ablation.parallel import Resources
from regard.demo.corpus import generate
from regard.errors import DataError
from regard.recipe.recipe import RecipeRequest


class StopError(Exception):
    """Raised to end an ablation in a test."""


def begin(folder: Path, request: Any) -> None:
    with open_ablation(request, folder, Settings(), Resources("cpu"), lambda _: None):
        pass


def stop() -> RecipeRequest:
    raise StopError


def test_a_refused_ablation_leaves_a_running_one_intact(tmp_path: Path) -> None:
    folder = tmp_path / "new"

    def meanwhile() -> RecipeRequest:
        (folder / "text").mkdir()
        with pytest.raises(DataError, match="is in use by another process"):
            begin(folder, stop)
        assert {path.name for path in folder.iterdir()} == {".lock", "runs", "text"}
        raise StopError

    with pytest.raises(StopError):
        begin(folder, meanwhile)
    assert not folder.exists()


def test_the_second_of_two_simultaneous_ablations_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second checks the folder before the first creates it, and locks it afterwards."""
    folder, lock = tmp_path / "new", experiment.locked
    with ExitStack() as first:

        def lock_late(*arguments: Any) -> Any:
            first.enter_context(lock(folder))
            (folder / "data").mkdir()
            return lock(*arguments)

        monkeypatch.setattr(experiment, "locked", lock_late)
        with pytest.raises(DataError, match="is in use by another process"):
            begin(folder, stop)
        assert {path.name for path in folder.iterdir()} == {".lock", "data"}


@pytest.mark.parametrize("link", ["runs", "runs/0123456789abcdef", "runs/.speed", "data", "text", "results.jsonl"])
def test_an_ablation_does_not_write_through_links(tmp_path: Path, link: str) -> None:
    folder, outside = tmp_path / "ablation", tmp_path / "outside"
    (outside / "runs").mkdir(parents=True)
    (outside / "mine").write_text("precious")
    (folder / link).parent.mkdir(parents=True)
    if link != "runs":
        (folder / "runs").mkdir(exist_ok=True)
    (folder / link).symlink_to(outside)
    with pytest.raises(DataError, match=f"{link} is a link"):
        begin(folder, stop)
    assert {path.name for path in outside.iterdir()} == {"runs", "mine"}
    assert (folder / link).is_symlink()


def test_another_folder_is_refused_and_kept(tmp_path: Path) -> None:
    for name in (".lock", ".saving", "mine"):
        (tmp_path / name).write_text("precious")
    with pytest.raises(DataError, match="is not the folder of an ablation"):
        begin(tmp_path, stop)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        (".lock", ".saving", "mine"), "precious"
    )


def test_the_demo_corpus_is_not_written_through_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "generate", lambda *_, **__: generate(20, held_out=2))
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "text").mkdir()
    for name in (".train.tsv-making", "train.tsv"):
        (tmp_path / "text" / name).symlink_to(tmp_path / "mine")
    demo.write(tmp_path / "text")
    assert (tmp_path / "mine").read_text() == "precious"
    assert len((tmp_path / "text" / "train.tsv").read_text().splitlines()) == 20
