"""Train the runs of an ablation in parallel worker processes, each with its own GPU if there are several."""

import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.ablation import single_run
from regard.ablation.plan import Job, Text
from regard.ablation.results import FAILED, Result
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
    import torch  # noqa: PLC0415  # only with a GPU

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


class Runner(ProcessPool):
    """A pool of worker processes for the jobs of an ablation. The processes end with the `with` block."""

    def __init__(self, folder: Path, machine: Resources, slots: Sequence[dict[str, str]] | None = None) -> None:
        super().__init__(machine.slots() if slots is None else slots)
        self.folder, self.machine = folder, machine

    def run(
        self, jobs: Iterable[Job], text: Text, measured: dict[str, Any], watch: Watch, deadline: float | None = None
    ) -> bool:
        """Run the jobs, pass every event to `watch`, and return True if all jobs were started.

        A job is not started if it would end after the deadline, assuming that it takes as long as the longest job so
        far. `measured["metric"]` is the metric to compute, and `measured["texts"]` is True to store translations.
        """
        waiting, busy, clock = deque(jobs), 0, _Clock(deadline)
        events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        while True:
            while waiting and busy < len(self.workers) and clock.enough():
                busy += 1
                self._begin(waiting.popleft(), text, measured, events.put)
            if not busy:
                return not waiting
            event = events.get()
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
        future = self.submit(single_run.run, order, on_event=lambda event: emit(event | {"job": job}))
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
        return self.submit(single_run.run, order, on_event=watch).result()["steps_per_second"]


class _Clock:
    """A time limit for starting jobs. A new job is assumed to take as long as the longest job so far."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline, self.longest = deadline, 0.0

    def took(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)

    def enough(self) -> bool:
        return self.deadline is None or time.monotonic() + self.longest < self.deadline
