"""The jobs of an ablation in worker processes: failures, cores, GPUs and deadlines."""

import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from regard.ablation import parallel
from regard.ablation.parallel import Resources, Runner, _Clock
from regard.ablation.plan import Job, Text
from regard.cluster.schedulers import Cluster
from regard.errors import SpecError
from regard.processes import ProcessPool
from regard.recipe.recipe import Recipe

# A worker that returns results without training; one row kills it.
WORKER = """
import json, os, sys
for job in map(json.loads, sys.stdin):
    row = job["args"][0]["about"]["row"]
    if row == "killed": os.kill(os.getpid(), 9)
    print(json.dumps({"event": {"event": "step", "step": 1}}), flush=True)
    answer = {"error": "no such part"} if row == "failed" else {"result": {"status": "done", "loss": 1.0}}
    print(json.dumps(answer), flush=True)
"""


def test_failed_jobs_and_killed_workers_do_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessPool, "command", (sys.executable, "-S", "-c", WORKER))
    recipe = Mock(spec=Recipe, record=dict)
    jobs = [
        Mock(spec=Job, row=row, seed=1, factor=1.0, hash=str(i), recipe=recipe)
        for i, row in enumerate(("first", "killed", "failed", "last"))
    ]
    events: list[dict[str, Any]] = []
    with Runner(tmp_path, Resources("cpu"), [{"OMP_NUM_THREADS": "1"}]) as runner:
        assert runner.run(jobs, Mock(spec=Text, folder=tmp_path), {}, events.append)
    assert [event["event"] for event in events if event["job"].row == "first"] == ["begin", "step", "done"]
    results = {event["job"].row: event["result"] for event in events if event["event"] == "done"}
    assert [result["status"] for result in results.values()] == ["done", "failed", "failed", "done"]
    assert results["killed"]["error"] == "its process was killed, perhaps because memory ran out"
    assert results["failed"]["error"] == "no such part"


def test_cores_are_divided_among_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert Resources("cpu").slots() == [{"OMP_NUM_THREADS": "1"}] * 8
    assert Resources("cpu", jobs=2).slots() == [{"OMP_NUM_THREADS": "4"}] * 2
    assert Resources("cpu", jobs=1, threads=3).slots() == [{"OMP_NUM_THREADS": "3"}]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert Resources("cpu", jobs=1).slots() == [{}]


def test_every_worker_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(parallel, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in Resources().slots()] == ["3", "5"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in Resources(jobs=3).slots()] == ["3", "5", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in Resources().slots()] == ["0", "1"]


def test_jobs_that_would_end_after_the_deadline_are_not_started() -> None:
    clock = _Clock(time.monotonic() + 100)
    assert clock.enough()
    clock.took(60.0)
    assert clock.enough()
    clock.took(200.0)
    assert not clock.enough()
    assert _Clock(None).enough()


def test_models_for_a_cluster_are_planned_for_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, cpus = Cluster("slurm", "gpu", ("gpus_per_node=1",)), Cluster("slurm", "cpu")
    assert Resources(cluster=gpus).planned_device().type == "cuda"
    assert Resources(cluster=cpus).planned_device().type == "cpu"
    assert Resources("cuda", cluster=cpus).planned_device().type == "cuda", "the login node needs no GPU"
    with pytest.raises(SpecError, match="--device"):
        Resources("tpu", cluster=cpus).planned_device()
    assert Resources(cluster=cpus).size() == 64
    assert Resources(cluster=cpus, jobs=3).size() == 3
