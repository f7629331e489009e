"""`regard compare`: recipes, curves and scores of runs side by side, finished or not."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.data.objectives import Translation
from regard.decoding.beam import Beam
from regard.errors import DataError, SpecError
from regard.runs.compare import differences
from tests.unit.decoding.untrained import complaint, printed, untrained


@dataclass(frozen=True)
class Folders:
    first: Path
    second: Path
    unfinished: Path


@pytest.fixture(autouse=True)
def single() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def logged(folder: Path, losses: list[float], speed: float, torn: bool = False) -> Path:
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "time": 0.0, "device": "cpu"}]
    for i, loss in enumerate(losses, start=1):
        events += [
            {"event": "step", "step": 10 * i, "time": 30.0 * i, "tokens_per_second": speed},
            {"event": "valid", "step": 10 * i, "time": 30.0 * i, "loss": loss, "bleu": 10 / loss, "repeating": 3.0},
        ]
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "log.jsonl").write_text(text + '{"event": "val' * torn)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("runs")
    first = logged(untrained(folder / "first", Translation()), [4.0, 2.0, 2.5], 1000.0)
    deeper: dict[str, Any] = {"decoder.depth": 2}
    second = logged(untrained(folder / "second", Translation(), Beam(3), **deeper), [3.0, 1.0], 500.0)
    unfinished = logged(untrained(folder / "third" / "first", Translation()), [5.0], 800.0, torn=True)
    (unfinished / "weights-final.safetensors").unlink()
    return Folders(first, second, unfinished)


def test_differences_are_listed_by_path(folders: Folders) -> None:
    comparison = regard.compare(folders.first, folders.second)
    assert comparison.differences == {"model.decoder.depth": (1, 2), "decode.beam_size": (5, 3)}
    assert comparison.runs[0].parameters == regard.load(folders.first, "cpu").parameters
    assert comparison.runs[0].parameters < comparison.runs[1].parameters


def test_best_scores_speed_and_time_come_from_the_log(folders: Folders) -> None:
    first, second = regard.compare(folders.first, folders.second).runs
    assert first.best("loss") == (20, 2.0)
    assert first.best("bleu") == (20, 5.0)
    assert first.best("chrf") is None
    assert (first.tokens_per_second, second.tokens_per_second) == (1000.0, 500.0)
    assert (first.seconds, first.step, first.finished, first.device) == (90.0, 30, True, "cpu")
    assert set(first.curves) == {"loss", "bleu"}
    assert second.curves["loss"] == [(10, 3.0), (20, 1.0)]


def test_the_table_names_every_run_and_fits_the_terminal(folders: Folders) -> None:
    text = printed("compare", folders.first, folders.second)
    assert max(map(len, text.splitlines())) <= 100
    for word in ("first", "second", "model.decoder.depth", "2 (step 20)", "1m 30s", "\u2588", "1,000"):
        assert word in text
    assert "vocab" not in text
    lines = [line.rstrip() for line in text.splitlines()]
    assert repr(regard.compare(folders.first, folders.second)).splitlines() == lines


def test_unfinished_runs_are_compared_by_their_logs(folders: Folders) -> None:
    comparison = regard.compare(folders.first, folders.unfinished)
    assert comparison.runs[1].step == 10
    assert not comparison.runs[1].finished
    assert "not finished" in repr(comparison)
    assert len({run.name for run in comparison.runs}) == 2  # folders of the same name are distinguished by their paths
    (folders.unfinished / "log.jsonl").unlink()
    assert regard.compare(folders.first, folders.unfinished).runs[1].curves == {}


def test_json_holds_curves_scores_and_differences(folders: Folders) -> None:
    record = json.loads(printed("compare", folders.first, folders.second, "--json"))
    assert record["differences"]["model.decoder.depth"] == [1, 2]
    assert record["runs"][0]["curves"]["loss"] == [[10, 4.0], [20, 2.0], [30, 2.5]]
    assert record["runs"][1]["best"]["loss"] == [20, 1.0]


@pytest.mark.parametrize("kind", ["png", "svg", "html"])
def test_plots_are_written(folders: Folders, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"curves.{kind}"
    printed("compare", folders.first, folders.second, "--plot", file)
    begin = file.read_bytes()[:60]
    assert {"png": b"PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[kind] in begin


def test_invalid_comparisons_are_refused_in_one_sentence(folders: Folders, tmp_path: Path) -> None:
    assert "at least two runs" in complaint("compare", folders.first)
    assert "is not a .png, .svg or .html file" in complaint(
        "compare", folders.first, folders.second, "--plot", tmp_path / "curves.txt"
    )
    with pytest.raises(DataError, match="does not exist"):
        regard.compare(folders.first, tmp_path / "nowhere")
    with pytest.raises(SpecError, match="--plot"):
        regard.compare(folders.first, folders.second).plot(tmp_path / "curves")


def test_values_of_different_structure_are_one_difference() -> None:
    records = [{"a": {"kind": "x", "n": 1}, "b": [1, 2]}, {"a": {"kind": "y", "m": 1}, "b": [1, 3]}]
    assert dict(differences(records)) == {"a": [records[0]["a"], records[1]["a"]], "b[1]": (2, 3)}
    assert list(differences([{"a": 1}, {"a": 1}])) == []
    assert dict(differences([{"a": 1}, {"a": True}, {}])) == {"a": [1, True, None]}
