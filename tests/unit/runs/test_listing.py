"""A list of runs: states, scores and time left from the files of runs, whatever else is in the folder."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from regard.errors import DataError, SpecError
from regard.files import locked
from regard.runs.listing import list_runs, plot_runs

RECIPE = {"train": {"steps": 100, "criterion": "bleu"}}


def event(kind: str, step: int, **values: Any) -> dict[str, Any]:
    return {"event": kind, "step": step, "time": step / 10, "clock": step / 5} | values


def training(steps: int) -> list[dict[str, Any]]:
    """The events of the first steps of a run of 100 steps, validated every 10."""
    events = [event("start", 0, steps=100)]
    for step in range(10, steps + 1, 10):
        events += [
            event("step", step, steps=100, loss=5.0 - step / 100),
            event("valid", step, loss=4.0 - step / 100, bleu=float(step if step < 50 else 1), best=min(step, 40)),
        ]
    return events


def write(folder: Path, events: list[dict[str, Any]], *, recipe: Any = RECIPE, **files: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    if recipe is not None:
        (folder / "recipe.json").write_text(json.dumps(recipe))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_states_steps_and_best_scores(tmp_path: Path) -> None:
    done = write(tmp_path / "a" / "done", [*training(100), event("end", 100, finished=True, why="all 100 steps done")])
    (done / "weights-final.safetensors").write_bytes(b"x" * 5000)
    write(tmp_path / "b", [*training(30), event("end", 30, finished=False, why="interrupted")])
    write(tmp_path / "c", training(60))
    write(tmp_path / "d", [*training(10), event("step", 20, loss=None, steps=100)])
    write(tmp_path / "e", [], recipe=None, request=RECIPE)
    runs = {run.name: run for run in list_runs(tmp_path)}
    states = {name: (run.state, run.why) for name, run in runs.items()}
    assert states == {
        "a/done": ("finished", "all 100 steps done"),
        "b": ("stopped", "interrupted"),
        "c": ("stopped", "killed"),
        "d": ("failed", "the loss is not finite at step 20"),
        "e": ("waiting", ""),
    }
    assert [(run.step, run.steps) for run in runs.values()] == [(100, 100), (30, 100), (60, 100), (20, 100), (0, 100)]
    assert (runs["a/done"].metric, runs["a/done"].score) == ("bleu", 40.0), "that of the best checkpoint"
    assert runs["e"].score is None
    assert 5000 < runs["a/done"].size < 20_000
    assert abs(runs["b"].modified - time.time()) < 600
    assert all(run.seconds_left is None for run in runs.values())
    assert json.loads(json.dumps([run.json() for run in runs.values()]))[0]["state"] == "finished"


def test_a_locked_run_is_running_and_has_time_left(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", training(40))
    with locked(folder):
        (run,) = list_runs(tmp_path)
    assert run.state == "running"
    assert run.seconds_left == pytest.approx((100 - 40) / 5, abs=5.0)
    (folder / ".lock").write_text("")  # left by a process that was killed
    assert list_runs(tmp_path)[0].state == "stopped"


def test_the_lock_of_another_process_is_seen(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", training(10))
    code = "import sys; from pathlib import Path; from regard.files import locked\n"
    code += "with locked(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        assert list_runs(folder)[0].state == "running"
        process.stdin.close()
    assert list_runs(folder)[0].state == "stopped"


def test_runs_of_an_ablation(tmp_path: Path) -> None:
    job = {"row": "gelu", "seed": 2, "factor": 1.0, "recipe": {"train": {"steps": 48, "criterion": "loss"}}}
    runs = tmp_path / "table" / "runs"
    write(runs / "1", training(20), recipe=None, job=job, result={"status": "done", "loss": 2.5})
    write(runs / "2", training(20), recipe=None, job=job, result={"status": "diverged", "error": "the loss is inf"})
    write(runs / "3", [], recipe=None, job=job)
    write(tmp_path / "other", [], recipe=None, job={"name": "not an ablation"})
    listed = list_runs(tmp_path)
    assert [(run.about, run.state) for run in listed] == [
        ("gelu seed 2", "finished"),
        ("gelu seed 2", "failed"),
        ("gelu seed 2", "waiting"),
    ]
    assert (listed[0].metric, listed[0].score) == ("loss", 2.5)
    assert listed[1].why == "the loss is inf"
    assert listed[2].steps == 48


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"null", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"train": 3}', b'{"train": {"steps": "x"}}',
        b'{"train": {"criterion": 3, "steps": true}}',
    ],
)  # fmt: skip
def test_damaged_files_leave_fields_empty(tmp_path: Path, damage: bytes) -> None:
    folder = write(tmp_path / "run", training(30))
    with open(folder / "log.jsonl", "ab") as log:
        log.write(b'{"event": "valid", "step": 99\n{"event": 3}\n[]\n{"event": "valid", "step": "x"}\n')
        log.write(b'{"event": "valid", "step": 40, "loss": NaN, "best": []}\n{"event": "step", "st')
    (folder / "recipe.json").write_bytes(damage)
    (folder / "result.json").write_bytes(damage)
    (run,) = list_runs(tmp_path)
    assert run.step == 40
    assert run.steps == 100
    json.dumps(run.json(), allow_nan=False)


def test_foreign_folders_and_links_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "recipe.txt").write_text("eggs")
    write(tmp_path / "run", training(10))
    (tmp_path / "run" / "data").mkdir()
    (tmp_path / "run" / "data" / "recipe.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [run.name for run in list_runs(tmp_path)] == ["run"]
    assert [run.name for run in list_runs(tmp_path / "run")] == ["run"], "the folder of a run itself"


def test_orders(tmp_path: Path) -> None:
    for i, (name, steps) in enumerate({"x": 30, "y": 10, "z": 20}.items()):
        folder = write(tmp_path / name, training(steps))
        for path in folder.iterdir():
            os.utime(path, (i, i))
    assert [run.name for run in list_runs(tmp_path)] == ["x", "y", "z"]
    assert [run.name for run in list_runs(tmp_path, "step")] == ["x", "z", "y"]
    assert [run.name for run in list_runs(tmp_path, "score")] == ["x", "z", "y"], "the highest BLEU first"
    assert [run.name for run in list_runs(tmp_path, "time")] == ["z", "y", "x"]
    assert [run.name for run in list_runs(tmp_path, "size")] == ["x", "z", "y"]
    for order in ("state", "left"):
        assert len(list_runs(tmp_path, order)) == 3
    with pytest.raises(SpecError, match="did you mean 'score'"):
        list_runs(tmp_path, "scores")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        list_runs(tmp_path / "nowhere")
    assert list_runs(tmp_path) == []


def test_hundreds_of_runs_are_listed_within_seconds(tmp_path: Path) -> None:
    for i in range(300):
        write(tmp_path / f"{i:04}", training(20))
    began = time.process_time()
    assert len(list_runs(tmp_path)) == 300
    assert time.process_time() - began < 3


@pytest.mark.parametrize("ending", ["png", "html"])
def test_curves_are_plotted(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a$b", "c"):
        write(tmp_path / "runs" / name, training(60))
    path = tmp_path / f"curves.{ending}"
    plot_runs(list_runs(tmp_path / "runs"), path)
    head = path.read_bytes()
    assert head.startswith(b"\x89PNG" if ending == "png" else b"<!doctype html>")
    if ending == "html":
        assert b"<svg" in head
        assert b"http://www.w3.org" in head
        assert b"<script" not in head
    with pytest.raises(DataError, match="no curve to plot"):
        plot_runs([], path)
    with pytest.raises(SpecError, match="is not a"):
        plot_runs([], tmp_path / "curves.gif")
