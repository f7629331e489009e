"""Train the runs of an ablation in parallel worker processes, one per GPU if there are several, or on a cluster."""

import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.ablation import single_run
from regard.ablation.plan import Job, Text
from regard.ablation.results import FAILED, Result
from regard.cluster.pool import ClusterPool
from regard.cluster.schedulers import Cluster
from regard.processes import ProcessPool, cores
from regard.runs.trained_model import choose_device
from regard.training.checkpoint import write_json

Watch = Callable[[dict[str, Any]], None]
MOST = 16  # default limit on simultaneous jobs on a CPU


@dataclass(frozen=True)
class Resources:
    """The device, the number of simultaneous jobs (training runs), and the number of threads per job."""

    device: str = "auto"
    jobs: int | None = None  # simultaneous jobs; None: one per GPU, or per core
    threads: int | None = None  # CPU threads per job; None: the cores are divided among the jobs
    trust_code: bool = False
    cluster: Cluster | None = None  # None: processes of this machine

    def planned_device(self) -> torch.device:
        """Return the device for which models and batches are planned: that of this machine, or of a cluster's nodes."""
        if self.cluster is None:
            return choose_device(self.device)
        if self.device == "auto":
            return torch.device("cuda" if self.cluster.has_gpus else "cpu")
        return torch.device(self.device) if self.device == "cuda" else choose_device(self.device)

    def size(self) -> int:
        """Return the number of simultaneous jobs."""
        return len(self.slots()) if self.cluster is None else self.jobs or self.cluster.at_once

    def slots(self) -> list[dict[str, str]]:
        """Return the environment variables for each worker, which set its number of threads and its GPU."""
        accelerated = choose_device(self.device).type != "cpu"
        gpus = _gpus() if self.device in ("auto", "cuda") and choose_device(self.device).type == "cuda" else []
        # Small models gain little from threads. With one thread each, results do not depend on the number of cores.
        count = self.jobs or (max(1, len(gpus)) if accelerated else min(cores(), MOST))
        inherited = self.threads is None and "OMP_NUM_THREADS" in os.environ
        threads = {} if inherited else {"OMP_NUM_THREADS": str(self.threads or max(1, cores() // count))}
        return [threads | ({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}) for i in range(count)]


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


class Runner:
    """Runs the jobs of an ablation in a pool of processes or of cluster jobs. All of them end with the `with` block."""

    def __init__(self, folder: Path, machine: Resources, slots: Sequence[dict[str, str]] | None = None) -> None:
        self.folder, self.machine = folder, machine
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.size = machine.size() if slots is None else len(slots)
        self.pool: ProcessPool | ClusterPool
        if machine.cluster is None:
            self.pool = ProcessPool(machine.slots() if slots is None else slots)
        else:
            threads = {"OMP_NUM_THREADS": str(machine.threads or 1)}
            self.pool = ClusterPool(machine.cluster, folder / "cluster", threads, self._report, _label)

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *given: object) -> None:
        self.pool.__exit__(*given)

    def _report(self, sentence: str) -> None:
        self.events.put({"event": "message", "text": sentence})

    def run(
        self, jobs: Iterable[Job], text: Text, measured: dict[str, Any], watch: Watch, deadline: float | None = None
    ) -> bool:
        """Run the jobs, pass every event to `watch`, and return True if all jobs were started.

        A job is not started if it would end after the deadline, assuming that it takes as long as the longest job so
        far. `measured["metric"]` is the metric to compute, and `measured["texts"]` is True to store translations.
        """
        waiting, busy, clock = deque(jobs), 0, _Clock(deadline)
        while True:
            while waiting and busy < self.size and clock.enough():
                busy += 1
                self._begin(waiting.popleft(), text, measured, self.events.put)
            if not busy:
                return not waiting
            event = self.events.get()
            if event["event"] == "done":
                busy -= 1
                clock.took(event["wall"])
            watch(event)

    def _begin(self, job: Job, text: Text, measured: dict[str, Any], emit: Watch) -> None:
        about = {"row": job.row, "seed": job.seed, "factor": job.factor}
        folder = self.folder / "runs" / job.hash
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "job.json", about | {"recipe": job.recipe.record()})
        emit({"event": "begin", "job": job})
        began = time.monotonic()

        def done(future: "Future[Result]") -> None:
            if future.cancelled():
                return
            error = future.exception()
            result = future.result() if error is None else {"status": FAILED, "error": str(error)}
            wall = time.monotonic() - began
            emit({"event": "done", "job": job, "wall": wall, "result": about | {"hash": job.hash} | result})

        order = self._order(folder, job, text) | {"about": about} | measured
        future = self.pool.submit(single_run.run, order, on_event=lambda event: emit(event | {"job": job}))
        future.add_done_callback(done)

    def _order(self, folder: Path, job: Job, text: Text) -> dict[str, Any]:
        return {
            "folder": str(folder.absolute()),
            "recipe": job.recipe.record(),
            "data": str(text.folder.absolute()),
            "device": self.machine.device,
            "trust_code": self.machine.trust_code,
        }

    def speed(self, job: Job, text: Text, seconds: float, watch: Watch) -> float:
        """Return the training steps per second of a job, or raise `JobError` if the model cannot be trained."""
        folder = self.folder / "runs" / ".speed"
        folder.mkdir(parents=True, exist_ok=True)
        order = self._order(folder, job, text) | {"seconds": seconds}
        return self.pool.submit(single_run.run, order, on_event=watch).result()["steps_per_second"]


def _label(order: dict[str, Any]) -> str:
    """Return the name of a job for messages."""
    about = order.get("about")
    return f"{about['row']} seed {about['seed']}" if about else "measuring the speed"


class _Clock:
    """A time limit for starting jobs. A new job is assumed to take as long as the longest job so far."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline, self.longest = deadline, 0.0

    def took(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)

    def enough(self) -> bool:
        return self.deadline is None or time.monotonic() + self.longest < self.deadline
