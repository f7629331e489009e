"""Runs in parallel: a few worker processes, each with its own GPU where there are several, one run after the other."""

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.ablation.plan import Job, Text
from regard.ablation.results import FAILED, Result
from regard.processes import python
from regard.runs.trained_model import choose_device
from regard.training.checkpoint import write_json

Watch = Callable[[dict[str, Any]], None]
MOST = 16  # runs at once on a CPU, if nothing else is said


@dataclass(frozen=True)
class Resources:
    """Where runs are made."""

    device: str = "auto"
    jobs: int | None = None  # how many at once; None: one for each GPU, or for each core
    threads: int | None = None  # CPU threads of each; None: the cores are shared out
    trust_code: bool = False

    def slots(self) -> list[dict[str, str]]:
        """What is special about the environment of each worker."""
        accelerated = choose_device(self.device).type != "cpu"
        gpus = _gpus() if self.device in ("auto", "cuda") and choose_device(self.device).type == "cuda" else []
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # Small models gain little from threads, and with one thread each a result is the same on any number of cores.
        count = self.jobs or (max(1, len(gpus)) if accelerated else min(cores, MOST))
        found = {"OMP_NUM_THREADS": str(self.threads or max(1, cores // count))}
        if self.threads is None and "OMP_NUM_THREADS" in os.environ:
            found = {}
        return [found | ({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}) for i in range(count)]


def _gpus() -> list[str]:
    import torch  # noqa: PLC0415  # asked only where there is a GPU

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


class Worker:
    """A process that carries out orders, begun anew when it has died."""

    def __init__(self, environment: dict[str, str], errors: Path) -> None:
        self.environment, self.errors = environment, errors
        self.process: subprocess.Popen[str] | None = None

    def ask(self, order: dict[str, Any], watch: Watch) -> Result:
        """Have an order carried out. A process that dies over it has failed, and is replaced by the next order."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "done":
                    return event["result"]
                watch(event)
        except (OSError, ValueError):  # a broken pipe, or no JSON in it: nothing more can be asked of this one
            process.kill()
        process.wait()
        self.kill()
        return {"status": FAILED, "error": self._why(process.returncode)}

    def _running(self) -> "subprocess.Popen[str]":
        if self.process is not None and self.process.poll() is not None:
            self.kill()
        if self.process is None:
            self.errors.unlink(missing_ok=True)  # opened as a new file, so that nothing is written through a link
            with open(self.errors, "x", encoding="utf-8") as errors:
                self.process = subprocess.Popen(
                    python("regard.ablation.work"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=os.environ | self.environment,
                    text=True,
                    encoding="utf-8",
                )
        return self.process

    def _why(self, code: int) -> str:
        if code == -9:
            return "its process was killed, perhaps because memory ran out"
        lines = self.errors.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"its process ended with code {code}" + (f": {last}" if last else "")

    def kill(self) -> None:
        """End the process at once."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what could not be written is not missed
                    if pipe is not None:
                        pipe.close()


class Pool:
    """Workers that share a list of runs. Leaving it ends them."""

    def __init__(self, folder: Path, machine: Resources, slots: Sequence[dict[str, str]] | None = None) -> None:
        self.folder, self.machine = folder, machine
        slots = machine.slots() if slots is None else slots
        self.closed = threading.Event()
        self.workers = [Worker(slot, folder / f"worker-{i}.log") for i, slot in enumerate(slots)]

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        for worker in self.workers:
            worker.kill()
            worker.errors.unlink(missing_ok=True)

    def run(
        self,
        jobs: Iterable[Job],
        text: Text,
        wanted: dict[str, Any],
        watch: Watch,
        deadline: float | None = None,
    ) -> bool:
        """Make all runs, telling of each; whether there was time for all. None is begun that would end too late.

        `wanted` says what is measured: a metric, and whether translations are kept (texts).
        """
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        events: queue.SimpleQueue[dict[str, Any] | BaseException | None] = queue.SimpleQueue()
        clock = _Clock(deadline)

        def work(worker: Worker) -> None:
            try:
                while clock.enough() and not self.closed.is_set():
                    try:
                        job = waiting.get_nowait()
                    except queue.Empty:
                        break
                    self._one(worker, job, text, wanted, events.put, clock)
            except BaseException as error:  # raised by whoever waits
                events.put(error)
            events.put(None)

        for worker in self.workers:
            threading.Thread(target=work, args=(worker,), daemon=True).start()
        busy = len(self.workers)
        while busy:
            event = events.get()
            if event is None:
                busy -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                watch(event)
        return waiting.empty()

    def _one(self, worker: Worker, job: Job, text: Text, wanted: dict[str, Any], tell: Watch, clock: "_Clock") -> None:
        about = {"row": job.row, "seed": job.seed, "factor": job.factor}
        folder = self.folder / "runs" / job.hash
        folder.mkdir(parents=True, exist_ok=True)
        order = self._order(folder, job.recipe.record(), text) | {"about": about} | wanted
        write_json(folder / "job.json", about | {"recipe": job.recipe.record()})
        tell({"event": "begin", "job": job})
        began = time.monotonic()
        result = worker.ask(order, lambda event: tell(event | {"job": job}))
        clock.took(time.monotonic() - began)
        tell({"event": "done", "job": job, "result": about | {"hash": job.hash} | result})

    def _order(self, folder: Path, recipe: dict[str, Any], text: Text) -> dict[str, Any]:
        return {
            "folder": str(folder.absolute()),
            "recipe": recipe,
            "data": str(text.folder.absolute()),
            "device": self.machine.device,
            "trust_code": self.machine.trust_code,
        }

    def speed(self, job: Job, text: Text, seconds: float, watch: Watch) -> float | str:
        """Steps a second of a run, measured; or why not."""
        folder = self.folder / "runs" / ".speed"
        folder.mkdir(parents=True, exist_ok=True)
        order = self._order(folder, job.recipe.record(), text) | {"seconds": seconds}
        result = self.workers[0].ask(order, watch)
        return result["steps_per_second"] if "steps_per_second" in result else str(result["error"])


class _Clock:
    """Whether there is time for another run, if it takes as long as those before it."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline, self.longest = deadline, 0.0

    def took(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)

    def enough(self) -> bool:
        return self.deadline is None or time.monotonic() + self.longest < self.deadline
