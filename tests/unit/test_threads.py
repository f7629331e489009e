"""How many threads: what is said, what a run was trained with, what was measured; never a guess."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import threads
from regard.cli.base import set_threads

FOUND: dict[threads.Kind, dict[int, float]] = {"train": {1: 1.0, 2: 0.6, 4: 0.58}, "decode": {1: 1.0, 2: 0.95, 4: 3.0}}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A quiet machine of four cores whose cache is empty; the list grows with every measurement."""
    calls: list[str] = []
    for name in threads.SAID:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("REGARD_CACHE_SIZE", raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "_quiet", lambda: True)
    monkeypatch.setattr(threads, "_measured", lambda: calls.append("measured") or FOUND)
    return calls


def test_the_fewest_that_are_as_fast_as_any() -> None:
    assert threads.best(FOUND["train"]) == 2
    assert threads.best(FOUND["decode"]) == 1
    assert threads.candidates(1) == [1]
    assert threads.candidates(2) == [1, 2]
    assert threads.candidates(8) == [1, 4, 8]


def test_measured_once_and_kept(machine: list[str]) -> None:
    assert threads.chosen("decode", measure=False) is None
    assert machine == []
    assert threads.chosen("train", measure=True) == 2
    assert threads.chosen("train", measure=True) == 2
    assert threads.chosen("decode", measure=False) == 1
    assert machine == ["measured"]


def test_what_is_measured_beside_others_holds_for_now(machine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_quiet", lambda: False)
    assert threads.chosen("train", measure=True) == 2
    assert threads.chosen("decode", measure=False) is None
    assert machine == ["measured"]


@pytest.mark.parametrize("name", threads.SAID)
def test_who_says_how_many_is_not_asked(machine: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "3")
    assert threads.chosen("train", measure=True) is None
    monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "cores", lambda: 1)
    assert threads.chosen("train", measure=True) is None
    assert machine == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"train": {}, "decode": {}}', '{"train": {"1": 1.0}}', '{"train": {"x": 1}, "decode": {"1": 1}}'],
)
def test_a_file_that_is_not_what_was_written_is_measured_again(machine: list[str], text: str) -> None:
    threads._file().parent.mkdir(parents=True)
    threads._file().write_text(text)
    assert threads.chosen("train", measure=False) is None
    assert threads.chosen("train", measure=True) == 2
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
