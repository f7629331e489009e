"""Workers that translate: outputs in order and as soon as they are available, failures in one sentence.

The workers in these tests convert lines to upper case.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from regard.data.tokenizer import Bytes, train
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.length_limit import LengthLimit
from regard.errors import DataError
from regard.inference.text import Constraints, Texts
from regard.processes import ProcessPool
from regard.runs import workers as module
from regard.runs.decode import TextDecoder
from regard.runs.options import cpu_threads
from regard.runs.workers import WorkerError, Workers, task_of

# Works like a worker, without a model. The lines "die" and "nonsense" end it, and "no" is an error.
UPPERCASE_WORKER = """
import json, os, sys, time
for job in map(json.loads, sys.stdin):
    task, first, lines = job["args"]
    print(json.dumps({"event": "loaded"}), flush=True)
    if "slow" in lines: time.sleep(0.3)
    if "die" in lines: os.kill(os.getpid(), 9)
    if "nonsense" in lines: print("what?", flush=True)
    if "no" in lines: print(json.dumps({"error": "no such luck"}), flush=True)
    usual = {"log_prob": 0.1, "ended": True, "ids": [4], "read": [5, 2]}
    outputs = [[{"text": t.upper(), "score": float(first + i), "tokens": [t], **usual}] for i, t in enumerate(lines)]
    warnings = [t for t in lines if t == "long"]
    print(json.dumps({"result": {"outputs": outputs, "warnings": warnings}}), flush=True)
"""


@pytest.fixture(autouse=True)
def uppercase_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessPool, "command", (sys.executable, "-S", "-c", UPPERCASE_WORKER))


def workers(count: int = 3, batch_size: int = 2) -> Workers:
    return Workers(count, {"batch_size": batch_size})


def processes(several: Workers) -> list[subprocess.Popen[str]]:
    return [worker.process for worker in several.pool.workers if worker.process is not None]


def drain(several: Workers, lines: Iterable[str], texts: list[str]) -> None:
    texts.extend(best[0].text for best in several.translate(lines))


def test_lines_come_back_in_order() -> None:
    lines = ["slow" if i in {0, 1, 40} else "long" if i == 30 else f"line {i}" for i in range(200)]
    warned: list[str] = []
    with workers() as several:
        outputs = list(several.translate(lines, warned.append))
    assert [best[0].text for best in outputs] == [line.upper() for line in lines]
    assert [best[0].score for best in outputs] == list(range(200))
    assert outputs[5][0].tokens == ("line 5",)
    assert outputs[5][0].read == (5, 2)
    assert warned == ["long"]


def test_a_line_does_not_wait_for_the_next() -> None:
    first_translated = threading.Event()

    def lines() -> Iterator[str]:
        yield "first"
        assert first_translated.wait(20)
        yield "second"

    with workers() as several:
        outputs = several.translate(lines())
        assert next(outputs)[0].text == "FIRST"
        first_translated.set()
        assert next(outputs)[0].text == "SECOND"
        assert next(outputs, None) is None


def test_no_lines() -> None:
    texts: list[str] = []
    with workers() as several:
        drain(several, [], texts)
    assert texts == []


def test_much_input_is_not_read_far_ahead() -> None:
    lines_read = 0

    def lines() -> Iterator[str]:
        nonlocal lines_read
        for i in range(10_000):
            lines_read += 1
            yield str(i)

    with workers(count=1, batch_size=1) as several:
        outputs = several.translate(lines())
        next(outputs)
        time.sleep(0.2)
        assert lines_read <= 130


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("die", r"^a worker was killed by signal 9 while it translated lines \d+ to \d+; .*fewer --workers"),
        ("nonsense", r"^a worker .*while it translated lines"),
        ("no", r"^no such luck$"),
    ],
)
def test_a_worker_that_fails_is_one_sentence(word: str, sentence: str) -> None:
    texts: list[str] = []
    lines = [*(f"line {i}" for i in range(30)), word, *("more" for _ in range(50))]
    with workers() as several:
        with pytest.raises(WorkerError, match=sentence):
            drain(several, lines, texts)
        running = processes(several)
    assert texts == [f"LINE {i}" for i in range(len(texts))]
    assert len(texts) <= 30
    assert all(process.returncode is not None for process in running)


def test_a_worker_that_cannot_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessPool, "command", (sys.executable, "-c", "raise SystemExit(3)"))
    with (
        workers() as several,
        pytest.raises(WorkerError, match=r"^a worker ended with code 3 before it translated any"),
    ):
        drain(several, ["one"], [])


def test_an_error_of_the_input_is_raised_after_the_lines_before_it() -> None:
    def lines() -> Iterator[str]:
        yield from ("one", "two")
        raise DataError("line 3 is bad")

    texts: list[str] = []
    with workers() as several, pytest.raises(DataError, match=r"^line 3 is bad$"):
        drain(several, lines(), texts)
    assert texts == ["ONE", "TWO"]


def test_leaving_the_block_ends_all_workers() -> None:
    running = []
    with suppress(KeyboardInterrupt), workers() as several:
        next(several.translate(["slow"] * 100))
        running += processes(several)
        raise KeyboardInterrupt
    assert [process.returncode for process in running] == [-9] * 3


@pytest.mark.parametrize(
    "constraints", [Constraints("x", ("y",), ("z",), 2), Constraints(required="word", banned="other")]
)
def test_a_worker_loads_the_runs_and_settings_of_the_command(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train(Bytes(), ["a"])
    texts = Texts((), tokenizer, tokenizer, 9, torch.device("cpu"))
    loaded: list[Any] = []
    monkeypatch.setattr(module, "load", lambda run, device, **options: loaded.append((run, device, options)))
    monkeypatch.setattr(module, "ensemble", lambda runs, warn: texts)
    limits = Limits(1, None, LengthLimit(1.5, 3, 9))
    decoder = TextDecoder(texts, True, Beam(3, 2, alpha=0.5), limits, constraints, 7)
    loading = {"average": 4, "trust_code": True, "plain": True}
    task = task_of(decoder, ["a", "b"], loading | {"device": "auto"})
    with cpu_threads(None):
        assert module._loaded.__wrapped__(json.dumps(task)) == (decoder, [])
    assert loaded == [(run, "cpu", loading | {"mapped": True}) for run in ("a", "b")]


def test_a_string_is_one_required_word() -> None:
    wishes = Constraints(required="word", banned="other")
    assert wishes == Constraints(required=("word",), banned=("other",))
