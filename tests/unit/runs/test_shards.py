"""Shards of a large file: outputs in order, continuation after an interruption, and errors that name the lines."""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.cluster.schedulers import Cluster, LocalScheduler
from regard.errors import DataError, SpecError
from regard.processes import StoppedError
from regard.runs import shards
from regard.runs.shards import Shards, check_options, node_task

pytest.importorskip("submitit")
# Works like `regard.runs.shards.translate_shard`, without a model, and counts its calls.
UPPER = """
import os, pathlib, signal, time
def translate_shard(record, first, lines, kept):
    pathlib.Path(kept).mkdir(exist_ok=True)
    (pathlib.Path(__file__).parent / "calls").open("a").write(f"{first}\\n")
    if first == 0: time.sleep(0.5)
    if "die" in lines: os.kill(os.getpid(), signal.SIGKILL)
    if "no" in lines: raise ValueError("no such luck")
    usual = {"log_prob": 0.1, "ended": True, "ids": [4], "read": [5, 2], "score": 0.5}
    outputs = [[{"text": text.upper(), "tokens": [text], **usual}] for text in lines]
    return {"outputs": outputs, "warnings": [text for text in lines if text == "long"]}
"""
TASK = {"threads": 1, "batch_size": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "upper_of_a_test.py").write_text(UPPER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path(regard.__path__[0]).parent))))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("upper_of_a_test", None)
    monkeypatch.setattr(shards, "translate_shard", importlib.import_module("upper_of_a_test").translate_shard)
    monkeypatch.setattr(LocalScheduler, "grace", 0.2)
    yield tmp_path
    del sys.modules["upper_of_a_test"]


def calls(folder: Path) -> list[int]:
    return sorted(map(int, (folder / "calls").read_text().split()))


def translated(folder: Path, lines: list[str], **options: Any) -> tuple[list[str], list[str]]:
    warnings: list[str] = []
    settings: dict[str, Any] = {"at_once": 2, "lines": 10} | options
    with Shards(Cluster("local", retries=1), folder / "work", TASK, **settings) as several:
        return [best[0].text for best in several.translate(lines, warnings.append)], warnings


def test_outputs_come_back_in_order_and_the_folder_is_removed(folder: Path) -> None:
    lines = [f"line {i}" for i in range(24)] + ["long"]
    texts, warnings = translated(folder, lines)
    assert texts == [line.upper() for line in lines]
    assert warnings == ["long"]
    assert calls(folder) == [0, 10, 20]
    assert not (folder / "work").exists()


def test_finished_shards_are_not_repeated(folder: Path) -> None:
    lines = [f"line {i}" for i in range(20)]
    with pytest.raises(DataError, match=r"^lines 21 to 21 have no translation: ValueError: no such luck$"):
        translated(folder, [*lines, "no"])
    assert (folder / "work").exists()
    assert calls(folder) == [0, 10, 20]
    texts, _ = translated(folder, [*lines, "yes"])
    assert texts == [line.upper() for line in (*lines, "yes")]
    assert calls(folder) == [0, 10, 20, 20]


def test_a_shard_whose_job_dies_names_its_lines(folder: Path) -> None:
    with pytest.raises(DataError, match=r"^lines 1 to 2 have no translation: its job died 2 times"):
        translated(folder, ["a", "die"])


class Decoder:
    """Stands for `regard.runs.workers.translate`: it fails at the line "die" until it is healed."""

    def __init__(self) -> None:
        self.healed = False
        self.calls: list[int] = []

    def translate(self, _: str, first: int, lines: list[str]) -> dict[str, Any]:
        self.calls.append(first)
        if "die" in lines and not self.healed:
            raise KeyboardInterrupt
        return {"outputs": [text.upper() for text in lines], "warnings": [f"line {first}"]}


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    decoder = Decoder()
    monkeypatch.setattr(shards, "translate", decoder.translate)
    return decoder


def test_a_job_that_is_killed_keeps_its_finished_lines(tmp_path: Path, decoder: Decoder) -> None:
    arguments = (json.dumps(TASK), 5, ["a"] * 40 + ["die"] * 40, str(tmp_path / "kept"))
    with pytest.raises(KeyboardInterrupt):
        shards.translate_shard(*arguments)
    decoder.healed = True
    answer = shards.translate_shard(*arguments)
    assert answer["outputs"] == ["A"] * 40 + ["DIE"] * 40
    assert answer["warnings"] == ["line 5", "line 37", "line 69"]
    assert decoder.calls == [5, 37, 37, 69]  # a piece is 32 lines


def test_a_job_stops_after_a_warning_and_is_continued(
    tmp_path: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "stop_requested", lambda: "SIGUSR2")
    arguments = (json.dumps(TASK), 0, ["a"] * 70, str(tmp_path / "kept"))
    for _ in range(2):
        with pytest.raises(StoppedError, match="SIGUSR2"):
            shards.translate_shard(*arguments)
    assert shards.translate_shard(*arguments)["outputs"] == ["A"] * 70
    assert decoder.calls == [0, 32, 64]  # each of the three jobs has translated one piece


def test_no_lines(folder: Path) -> None:
    assert translated(folder, []) == ([], [])
    assert not (folder / "work").exists()


def test_a_folder_with_other_files_is_refused(folder: Path) -> None:
    (folder / "work").mkdir()
    (folder / "work" / "mine.txt").write_text("")
    with pytest.raises(DataError, match="contains other files; choose another folder with --work"):
        translated(folder, ["a"])


def test_other_weights_are_another_task(folder: Path) -> None:
    (folder / "run").mkdir()
    path = folder / "run" / "weights-final.safetensors"
    path.write_bytes(b"1")
    task = {"runs": [str(folder / "run")]}
    first = node_task(task, "auto", None)
    assert first == node_task(task, "auto", 1)
    path.write_bytes(b"12")
    assert json.dumps(first) != json.dumps(node_task(task, "auto", None))


def test_options_that_need_a_cluster() -> None:
    for options in ({"work": "x", "shard_lines": None}, {"work": None, "shard_lines": 3}):
        with pytest.raises(SpecError, match="applies to --cluster"):
            check_options(None, "native", **options)
    with pytest.raises(SpecError, match="native engine, not with 'ctranslate2'"):
        check_options(Cluster("local"), "ctranslate2", None, None)
