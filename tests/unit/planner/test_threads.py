"""The number of CPU threads: set by the user, stored with a training run, measured, or 1 for a small model."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli.base import set_threads
from regard.planner import threads

TIMINGS: dict[threads.Kind, dict[int, float]] = {
    "train": {1: 1.0, 2: 0.6, 4: 0.58},
    "decode": {1: 1.0, 2: 0.95, 4: 3.0},
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate an idle machine with four cores and an empty cache. The list gets an entry for every measurement."""
    calls: list[str] = []
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("REGARD_CACHE_SIZE", raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "quiet", lambda: True)
    monkeypatch.setattr(threads, "idle_cores", lambda: 4.0)
    monkeypatch.setattr(threads, "_measured", lambda: calls.append("measured") or TIMINGS)
    return calls


def test_the_smallest_of_the_fastest_numbers_is_chosen() -> None:
    assert threads.best(TIMINGS["train"]) == 2
    assert threads.best(TIMINGS["decode"]) == 1
    assert threads.candidates(1) == [1]
    assert threads.candidates(2) == [1, 2]
    assert threads.candidates(8) == [1, 4, 8]


def test_threads_are_measured_once_and_stored(machine: list[str]) -> None:
    assert threads.for_training() == 2
    assert threads.for_training() == 2
    assert threads.for_decoding() == 1
    assert machine == ["measured"]


def test_measurements_on_a_busy_machine_are_not_stored(machine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "quiet", lambda: False)
    assert threads.for_training() == 2
    assert threads._read() is None
    assert machine == ["measured"]


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_nothing_is_measured_if_the_user_sets_the_number_or_there_is_one_core(
    machine: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
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
    assert machine == []  # decoding never waits for a measurement


def test_a_measurement_is_used_for_small_models_too(machine: list[str]) -> None:
    threads._write({"train": TIMINGS["train"], "decode": {1: 1.0, 2: 0.5, 4: 0.48}})
    assert threads.for_decoding(1000) == 2


@pytest.mark.parametrize(("idle", "expected"), [(4.0, 4), (3.9, 4), (2.2, 2), (1.0, 1), (0.0, 1)])
def test_decoding_uses_no_more_threads_than_idle_cores(
    machine: list[str], monkeypatch: pytest.MonkeyPatch, idle: float, expected: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threads, "idle_cores", lambda: idle)
    assert threads.for_decoding(10**9) == expected
    threads._write({"train": TIMINGS["train"], "decode": {1: 1.0, 2: 0.5, 4: 0.1}})
    assert threads.for_decoding(1000) == expected


def test_idle_cores_are_counted_from_clock_ticks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stat(first: int, second: int) -> str:
        busy = "intr 1 2 3\ncpu2 0 0 0 9 0 0 0 0 0 0\n"  # a core that this process may not use
        return f"cpu  1 2 3\ncpu0 {100 - first} 0 0 {first} 0 0 0 0 0 0\ncpu1 5 0 0 {second - 10} 5 0 0 0 7 7\n{busy}"

    monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    threads.STAT.write_text(stat(50, 100))
    assert threads._ticks() == {0: (50, 100), 1: (95, 100), 2: (9, 9)}
    monkeypatch.setattr(threads.time, "sleep", lambda _: threads.STAT.write_text(stat(50, 110)))
    assert threads.idle_cores() == 1.0  # cpu0 has no ticks, cpu1 was idle throughout


@pytest.mark.parametrize("text", ["", "cpu0 a b\n", "cpu0 0 0 0 0 0 0 0 0\n", None])
def test_without_clock_ticks_the_load_average_is_used(
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
def test_a_damaged_measurement_is_repeated(machine: list[str], text: str) -> None:
    threads._file().parent.mkdir(parents=True)
    threads._file().write_text(text)
    assert threads.for_decoding(1000) == 1
    assert threads.for_training() == 2
    assert json.loads(threads._file().read_text())["train"]["2"] == 0.6
    assert machine == ["measured"]


@pytest.mark.parametrize(
    "failure", [subprocess.CalledProcessError(-4, "it"), subprocess.TimeoutExpired("it", 1), OSError()]
)
def test_a_measurement_may_fail(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example if the process executes an instruction that the processor does not have."""

    def run(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(subprocess, "run", run)
    assert threads._measured() is None


def test_measuring_returns_positive_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "candidates", lambda _: [torch.get_num_threads()])
    monkeypatch.setattr(threads, "ROUNDS", 1)
    timings = threads.measure()
    assert threads._parsed(json.dumps(timings)) == timings
    assert all(spent > 0 for by_threads in timings.values() for spent in by_threads.values())


def test_training_resumes_with_the_stored_number_of_threads(
    machine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    set_threads(None, "train", "cpu", tmp_path)  # nothing is stored
    (tmp_path / "environment.json").write_text('{"threads": 3}')
    set_threads(None, "train", "cpu", tmp_path)
    set_threads(5, "train", "cpu", tmp_path)
    set_threads(None, "train", "cuda")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    set_threads(None, "train", "cpu", tmp_path)
    assert numbers == [2, 3, 5]
    assert machine == ["measured"]


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"threads": "2"}', '{"threads": 0}'])
def test_a_damaged_file_gives_no_number_of_threads(tmp_path: Path, text: str) -> None:
    assert threads.recorded(tmp_path) is None
    (tmp_path / "environment.json").write_text(text)
    assert threads.recorded(tmp_path) is None
