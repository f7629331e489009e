"""Processes of our own import nothing from the folder that the user happens to be in."""

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import regard
from regard.ablation import runner
from regard.ablation.results import FAILED
from regard.decoding.beam import Beam
from regard.errors import DataError
from regard.planner import threads
from regard.processes import python
from regard.runs.workers import Task, Workers
from regard.training import log

NAMES = ("torch", "safetensors", "numpy", "regard", "json", "tokenizers", "sitecustomize")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: full of modules that leave a trace when they are imported.

    PYTHONPATH is heeded, and has a torch that ends a process with code 7: what comes after it does not matter here.
    """
    for name in NAMES:
        trace = f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        (tmp_path / f"{name}.py").write_text(trace)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path / "path"), str(Path(regard.__path__[0]).parent))))
    return tmp_path


def measured() -> None:
    assert threads._measured() is None


def translated() -> None:
    with pytest.raises(DataError, match="ended with code 7"), Workers(1, Task(["nowhere"], Beam(1))) as workers:
        list(workers.translate(["one"]))


def ablated() -> None:
    worker = runner.Worker({}, Path("worker.log"))
    try:
        result = worker.ask({"folder": "x", "recipe": {}, "trust_code": False}, lambda _: None)
        assert result == {"status": FAILED, "error": "its process ended with code 7"}
    finally:
        worker.kill()


def committed() -> None:
    log._commit()


def test_no_process_imports_from_the_working_folder(hostile: Path) -> None:
    faults: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            faults.append(error)

    started = [threading.Thread(target=run, args=(work,)) for work in (measured, translated, ablated, committed)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not faults
    assert not (hostile / "imported").exists(), (hostile / "imported").read_text()


def test_the_working_folder_is_not_on_the_path(hostile: Path) -> None:
    assert subprocess.run(python("this"), capture_output=True, check=False, text=True).stdout.startswith("The Zen")
    assert not (hostile / "imported").exists()
    plain = [word for word in python("regard.data.cache") if word != "-P"]
    subprocess.run(plain, check=False, capture_output=True)
    assert (hostile / "imported").exists(), "the folder is not hostile"


def test_git_asks_no_other_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = log._commit()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.setenv(name, str(tmp_path / ".git" if name == "GIT_DIR" else tmp_path))
    assert log._commit()["commit"] == before["commit"]
