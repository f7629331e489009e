"""Worker processes: jobs, events and failures; and nothing is imported from the working folder."""

import importlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.ablation import single_run
from regard.errors import DataError
from regard.planner import threads
from regard.processes import JobError, ProcessPool, WorkerDiedError, python
from regard.runs.workers import Workers
from regard.training import log

NAMES = ("torch", "safetensors", "numpy", "regard", "json", "tokenizers", "sitecustomize")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder full of modules that write a trace file when they are imported.

    PYTHONPATH is used and contains a torch that ends the process with code 7, which ends each of these tests.
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
    with pytest.raises(DataError, match="ended with code 7"), Workers(1, {"batch_size": 1}) as workers:
        list(workers.translate(["one"]))


def called() -> None:
    with ProcessPool([{}]) as pool:
        future = pool.submit(single_run.run, {"folder": "x"}, on_event=lambda _: None)
        with pytest.raises(WorkerDiedError, match="ended with code 7"):
            future.result()


def committed() -> None:
    log._commit()


def test_no_process_imports_from_the_working_folder(hostile: Path) -> None:
    faults: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            faults.append(error)

    started = [threading.Thread(target=run, args=(work,)) for work in (measured, translated, called, committed)]
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


def test_the_commit_is_that_of_regards_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = log._commit()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.setenv(name, str(tmp_path / ".git" if name == "GIT_DIR" else tmp_path))
    assert log._commit()["commit"] == before["commit"]


JOBS = """
import os, signal, time

def add(a, b): return a + b
def variable(name): return os.environ.get(name)
def fail(): raise ValueError("no such luck\\nat all")
def die(code): print("last words", flush=True); os._exit(code)
def kill(): os.kill(os.getpid(), signal.SIGKILL)
def count(n, emit): return [emit({"step": i}) for i in range(n)]
def loud(): print("{"); return 1
def wait(path, seconds): open(path, "w").write(str(os.getpid())); time.sleep(seconds)
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "jobs_of_a_test.py").write_text(JOBS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path(regard.__path__[0]).parent))))
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("jobs_of_a_test")


def test_jobs_return_values_and_emit_events(jobs: Any) -> None:
    events: list[Any] = []
    with ProcessPool([{"SLOT": "a"}]) as pool:
        assert isinstance(pool, Executor)
        assert [future.result() for future in [pool.submit(jobs.add, i, b=1) for i in range(5)]] == [1, 2, 3, 4, 5]
        assert pool.submit(jobs.count, 3, on_event=events.append).result() == [None] * 3
        assert pool.submit(jobs.variable, "SLOT").result() == "a"
        assert pool.submit(jobs.loud).result() == 1
    assert events == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_a_failed_job_does_not_affect_other_jobs(jobs: Any) -> None:
    with ProcessPool([{}]) as pool:
        futures = [
            pool.submit(jobs.add, 1, 1),
            pool.submit(jobs.fail),
            pool.submit(jobs.kill),
            pool.submit(jobs.die, 3),
        ]
        last = pool.submit(jobs.add, 2, 2)
        assert futures[0].result() == 2
        with pytest.raises(JobError, match=r"^ValueError: no such luck$"):
            futures[1].result()
        with pytest.raises(
            WorkerDiedError, match=r"^its process was killed, perhaps because memory ran out$"
        ) as killed:
            futures[2].result()
        with pytest.raises(WorkerDiedError, match=r"^its process ended with code 3: last words$"):
            futures[3].result()
        assert last.result() == 4
    assert killed.value.how == "was killed by signal 9"


def test_leaving_the_block_ends_running_jobs_at_once(jobs: Any, tmp_path: Path) -> None:
    began, running = time.monotonic(), []
    with suppress(KeyboardInterrupt), ProcessPool([{}, {}]) as pool:
        running += [pool.submit(jobs.wait, str(tmp_path / str(i)), 600) for i in range(5)]
        while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert time.monotonic() - began < 300
    assert all(future.done() for future in running)
    for worker in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(worker)).read_text()), 0)
