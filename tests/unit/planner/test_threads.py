"""How many threads: what is said, what a run was trained with, what was measured; one for a small model."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli.base import set_threads
from regard.planner import threads

FOUND: dict[threads.Kind, dict[int, float]] = {"train": {1: 1.0, 2: 0.6, 4: 0.58}, "decode": {1: 1.0, 2: 0.95, 4: 3.0}}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A quiet machine of four cores whose cache is empty; the list grows with every measurement."""
    calls: list[str] = []
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("REGARD_CACHE_SIZE", raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "quiet", lambda: True)
    monkeypatch.setattr(threads, "idle_cores", lambda: 4.0)
    monkeypatch.setattr(threads, "_measured", lambda: calls.append("measured") or FOUND)
    return calls


def test_the_fewest_that_are_as_fast_as_any() -> None:
    assert threads.best(FOUND["train"]) == 2
    assert threads.best(FOUND["decode"]) == 1
    assert threads.candidates(1) == [1]
    assert threads.candidates(2) == [1, 2]
    assert threads.candidates(8) == [1, 4, 8]


def test_measured_once_and_kept(machine: list[str]) -> None:
    assert threads.for_training() == 2
    assert threads.for_training() == 2
    assert threads.for_decoding() == 1
    assert machine == ["measured"]


def test_what_is_measured_beside_others_holds_for_now(machine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "quiet", lambda: False)
    assert threads.for_training() == 2
    assert threads._read() is None
    assert machine == ["measured"]


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_who_says_how_many_is_not_asked(machine: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "3")
    assert threads.for_training() is threads.for_decoding(1) is None
    monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "cores", lambda: 1)
    assert threads.for_training() is threads.for_decoding(1) is None
    assert machine == []


def test_without_a_measurement_a_small_model_decodes_with_one_thread(
    machine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert threads.for_decoding(threads.SMALL - 1) == 1
    assert threads.for_decoding(threads.SMALL) == 4
    assert threads.for_decoding() == 4
    assert machine == []  # decoding never waits for one


def test_a_measurement_decides_for_small_models_too(machine: list[str]) -> None:
    threads._write({"train": FOUND["train"], "decode": {1: 1.0, 2: 0.5, 4: 0.48}})
    assert threads.for_decoding(1000) == 2


@pytest.mark.parametrize(("idle", "expected"), [(4.0, 4), (3.9, 4), (2.2, 2), (1.0, 1), (0.0, 1)])
def test_no_more_threads_than_idle_cores(
    machine: list[str], monkeypatch: pytest.MonkeyPatch, idle: float, expected: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threads, "idle_cores", lambda: idle)
    assert threads.for_decoding(10**9) == expected
    threads._write({"train": FOUND["train"], "decode": {1: 1.0, 2: 0.5, 4: 0.1}})
    assert threads.for_decoding(1000) == expected


def test_idle_cores_by_the_ticks_of_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stat(first: int, second: int) -> str:
        busy = "intr 1 2 3\ncpu2 0 0 0 9 0 0 0 0 0 0\n"  # another's core
        return f"cpu  1 2 3\ncpu0 {100 - first} 0 0 {first} 0 0 0 0 0 0\ncpu1 5 0 0 {second - 10} 5 0 0 0 7 7\n{busy}"

    monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    threads.STAT.write_text(stat(50, 100))
    assert threads._ticks() == {0: (50, 100), 1: (95, 100), 2: (9, 9)}
    monkeypatch.setattr(threads.time, "sleep", lambda _: threads.STAT.write_text(stat(50, 110)))
    assert threads.idle_cores() == 1.0  # cpu0 has counted nothing, cpu1 was idle throughout


@pytest.mark.parametrize("text", ["", "cpu0 a b\n", "cpu0 0 0 0 0 0 0 0 0\n", None])
def test_without_ticks_the_load_average_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
    if text is not None:
        threads.STAT.write_text(text)
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads.os, "getloadavg", lambda: (2.5, 0, 0), raising=False)
    assert threads.idle_cores() == 1.5


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"train": {}, "decode": {}}', '{"train": {"1": 1.0}}', '{"train": {"x": 1}, "decode": {"1": 1}}'],
)
def test_a_file_that_is_not_what_was_written_is_measured_again(machine: list[str], text: str) -> None:
    threads._file().parent.mkdir(parents=True)
    threads._file().write_text(text)
    assert threads.for_decoding(1000) == 1
    assert threads.for_training() == 2
    assert json.loads(threads._file().read_text())["train"]["2"] == 0.6
    assert machine == ["measured"]


@pytest.mark.parametrize(
    "death", [subprocess.CalledProcessError(-4, "it"), subprocess.TimeoutExpired("it", 1), OSError()]
)
def test_a_measurement_may_die(death: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that meets an instruction which the machine only claims to have."""

    def run(*_: Any, **__: Any) -> None:
        raise death

    monkeypatch.setattr(subprocess, "run", run)
    assert threads._measured() is None


def test_a_real_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "candidates", lambda _: [torch.get_num_threads()])
    monkeypatch.setattr(threads, "ROUNDS", 1)
    found = threads.measure()
    assert threads._parsed(json.dumps(found)) == found
    assert all(spent > 0 for by_threads in found.values() for spent in by_threads.values())


def test_a_run_goes_on_with_the_threads_it_had(
    machine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    set_threads(None, "train", "cpu", tmp_path)  # nothing recorded
    (tmp_path / "environment.json").write_text('{"threads": 3}')
    set_threads(None, "train", "cpu", tmp_path)
    set_threads(5, "train", "cpu", tmp_path)
    set_threads(None, "train", "cuda")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    set_threads(None, "train", "cpu", tmp_path)
    assert asked == [2, 3, 5]
    assert machine == ["measured"]


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"threads": "2"}', '{"threads": 0}'])
def test_a_damaged_record_says_nothing(tmp_path: Path, text: str) -> None:
    assert threads.recorded(tmp_path) is None
    (tmp_path / "environment.json").write_text(text)
    assert threads.recorded(tmp_path) is None
