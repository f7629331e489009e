"""Workers: one that fails or dies costs its own run and no other."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from regard.ablation import runner
from regard.ablation.runner import Resources, Worker, _Clock


def bad_order(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), "recipe": {"kind": "nonsense"}, "device": "cpu", "trust_code": False}


def test_a_worker_survives_a_bad_order_and_is_replaced_when_it_dies(tmp_path: Path) -> None:
    worker = Worker({"OMP_NUM_THREADS": "1"}, tmp_path / "log")
    try:
        first = worker.ask(bad_order(tmp_path), lambda _: None)
        assert first["status"] == "failed"
        assert "nonsense" in first["error"]
        process = worker.process
        assert process is not None
        threading.Timer(0.2, process.kill).start()
        while process.poll() is None:
            time.sleep(0.01)
        assert "nonsense" in worker.ask(bad_order(tmp_path), lambda _: None)["error"]
        assert worker.process is not process
        died = worker.process
        assert died is not None
        died.kill()
        # Written to while it dies, it is gone before it answers.
        died.poll = lambda: None
        assert "killed" in worker.ask(bad_order(tmp_path), lambda _: None)["error"]
    finally:
        worker.kill()
    assert worker.process is None


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert Resources("cpu").slots() == [{"OMP_NUM_THREADS": "1"}] * 8
    assert Resources("cpu", jobs=2).slots() == [{"OMP_NUM_THREADS": "4"}] * 2
    assert Resources("cpu", jobs=1, threads=3).slots() == [{"OMP_NUM_THREADS": "3"}]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert Resources("cpu", jobs=1).slots() == [{}]


def test_every_worker_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(runner, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in Resources().slots()] == ["3", "5"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in Resources(jobs=3).slots()] == ["3", "5", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in Resources().slots()] == ["0", "1"]


def test_no_run_is_begun_that_would_end_too_late() -> None:
    clock = _Clock(time.monotonic() + 100)
    assert clock.enough()
    clock.took(60.0)
    assert clock.enough()
    clock.took(200.0)
    assert not clock.enough()
    assert _Clock(None).enough()
