"""Records of training: the log, TensorBoard events and the environment."""

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import RegardError
from regard.training import log as module
from regard.training.checkpoint import SaveError
from regard.training.log import Log, TensorBoard, environment

EVENTS: list[dict[str, Any]] = [
    {"event": "start", "step": 0, "steps": 9},
    {"event": "step", "step": 2, "loss": 2.5},
    {"event": "valid", "step": 4, "loss": 2.25, "bleu": 3.0},
    {"event": "step", "step": 5, "loss": 2.0},
]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def written(path: Path) -> Path:
    log = Log(path)
    for event in EVENTS:
        log.note(event)
    return path


def test_every_event_is_written_immediately(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    for count, event in enumerate(EVENTS, start=1):
        log.note(event)
        assert lines_of(tmp_path / "log.jsonl") == EVENTS[:count]


@pytest.mark.parametrize(("step", "kept"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (99, 4)])
def test_lines_of_later_steps_are_removed_when_training_resumes(tmp_path: Path, step: int, kept: int) -> None:
    path = written(tmp_path / "log.jsonl")
    log = Log(path, step)
    assert lines_of(path) == EVENTS[:kept]
    log.note({"event": "start", "step": step})
    assert lines_of(path) == [*EVENTS[:kept], {"event": "start", "step": step}]
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("left", ["", "{", '{"event": "step", "st', '{"event": "step", "step": 3}', '{"other": 1}\n'])
def test_unfinished_last_line_is_removed(tmp_path: Path, left: str) -> None:
    path = written(tmp_path / "log.jsonl")
    with open(path, "a", encoding="utf-8") as file:
        file.write(left)
    Log(path, 99).note({"event": "end", "step": 9})
    assert lines_of(path) == [*EVENTS, {"event": "end", "step": 9}]


def test_log_is_strict_json(tmp_path: Path) -> None:
    """JSON has no NaN."""
    log = Log(tmp_path / "log.jsonl")
    log.note({"event": "valid", "step": 1, "loss": math.nan, "all": [1.5, math.inf, {"x": -math.inf}], "best": 1})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    event = json.loads(line, parse_constant=refuse)
    assert event == {"event": "valid", "step": 1, "loss": None, "all": [1.5, None, {"x": None}], "best": 1}
    Log(tmp_path / "log.jsonl", 1)  # a line of an earlier version is kept as it is
    with open(tmp_path / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"event": "valid", "step": 1, "loss": NaN}\n')
    Log(tmp_path / "log.jsonl", 1)
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 2


@pytest.fixture
def full() -> Iterator[Callable[[], None]]:
    """A function that simulates a full disk: no file may grow beyond 1 kB until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def note_many(watcher: Log | TensorBoard) -> None:
    for step in range(100):
        watcher.note({"event": "valid", "step": step, "loss": 1.0})


def test_full_disk_is_reported_in_one_sentence(tmp_path: Path, full: Callable[[], None]) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path)
    note_many(log)
    whole = path.read_bytes()
    full()
    sentence = (
        r"cannot save to .*log\.jsonl: File too large; free disk space, then continue from the last checkpoint with"
    )
    with pytest.raises(SaveError, match=sentence):
        note_many(log)
    with pytest.raises(SaveError, match=sentence):
        Log(path, 99)
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]
    assert path.read_bytes() == whole
    assert issubclass(SaveError, RegardError)


@pytest.mark.skipif(not TensorBoard.installed(), reason="needs tensorboard")
def test_full_disk_is_reported_in_one_sentence_with_tensorboard(
    tmp_path: Path, full: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    full()
    with pytest.raises(SaveError, match=r"cannot save to .*tensorboard: File too large; free disk space"):
        note_many(board)
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of a fake SummaryWriter, without the package."""
    calls: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: Path, purge_step: int | None) -> None:
            calls.append(("open", folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def flush(self) -> None:
            calls.append(("flush",))

        def close(self) -> None:
            calls.append(("close",))

    fake = type(json)("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    return calls


def test_tensorboard_receives_metrics_of_steps_and_validations(tmp_path: Path, recorded: list[tuple[Any, ...]]) -> None:
    board = TensorBoard(tmp_path)
    for event in (
        *EVENTS[:1],
        {"event": "step", "step": 2, "time": 1.5, "loss": 2.5, "rate": 0.1},
        {"event": "save", "step": 2, "time": 2.0},
        {"event": "valid", "step": 4, "time": 2.5, "bleu": 3.0, "best": 4},
        {"event": "end", "step": 4, "finished": True},
    ):
        board.note(event)
    assert recorded == [
        ("open", tmp_path, None),
        *(("step/loss", 2.5, 2), ("step/rate", 0.1, 2)),
        *(("valid/bleu", 3.0, 4), ("valid/best", 4, 4), ("flush",)),
        ("close",),
    ]


def test_tensorboard_purges_later_steps_when_training_resumes(tmp_path: Path, recorded: list[tuple[Any, ...]]) -> None:
    TensorBoard(tmp_path, 7)
    assert recorded == [("open", tmp_path, 8)]


def test_tensorboard_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in (None, object()):
        monkeypatch.setattr(module, "find_spec", lambda name, spec=spec: spec if name == "tensorboard" else 1)
        assert TensorBoard.installed() == (spec is not None)


def test_environment_has_versions_device_and_commit() -> None:
    record = environment(torch.device("cpu"))
    assert record["device"] == "cpu"
    assert record["packages"]["torch"] == metadata.version("torch")
    assert set(record) == {
        *("python", "platform", "packages", "device", "threads", "cuda", "command", "commit", "diff"),
    }
    assert len(record["commit"] or "0" * 40) == 40
    json.dumps(record)


def test_a_version_that_is_not_installed_is_none() -> None:
    assert module.version("no-such-package-at-all") is None


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert module._commit() == {"commit": None, "diff": None}


def test_the_commit_of_another_project_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """regard installed inside somebody's checkout has no commit of its own."""

    class Done:
        stdout = "/somewhere/else\n"

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: Done)
    assert module._commit() == {"commit": None, "diff": None}
