"""The result of a benchmark: table rows and a description of the machine, as JSON and as a table."""

import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from regard.bench.decode import WORKLOADS, decode
from regard.bench.peers import Peer
from regard.bench.race import WARM_UP, Report, Row
from regard.bench.shapes import SHAPES
from regard.bench.train import TrainingWork, train
from regard.planner.threads import cpu
from regard.training.log import version

PACKAGES = ("torch", "transformers", "x-transformers", "fairseq-fixed", "joeynmt", "ctranslate2", "numpy")


@dataclass(frozen=True)
class RaceReport:
    """The result of a benchmark: the task, the machine, and one table row per model."""

    task: str
    shape: str
    rounds: int
    device: str
    unit: str
    machine: dict[str, Any]
    rows: list[Row]

    def json(self) -> dict[str, Any]:
        return asdict(self)

    def headings(self) -> tuple[str, ...]:
        memory = ("peak GB",) if any(row.memory_gb is not None for row in self.rows) else ()
        return "", "tokens/s", "ratio", "95 % interval", "parameters", *memory

    def lines(self) -> list[tuple[str, ...]]:
        """Return the cells of the table as text, without the headings."""
        return [_line(row)[: len(self.headings())] for row in self.rows]


def _line(row: Row) -> tuple[str, ...]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    interval = "-" if row.low is None or row.high is None else f"{row.low:.2f} .. {row.high:.2f}"
    memory = "-" if row.memory_gb is None else f"{row.memory_gb:.1f}"
    return row.name, f"{row.tokens_per_second:,.0f}", ratio, interval, f"{row.parameters:,}", memory


def run(
    task: str, shape: str, peers: Sequence[Peer], rounds: int, smoothing: float, device: torch.device, report: Report
) -> RaceReport:
    """Run the benchmark of a task (`train` or `decode`) and return the result. Log messages of libraries are hidden."""
    second = "CPU second" if device.type == "cpu" else "second"
    logging.disable(logging.WARNING)
    try:
        if task == "train":
            unit = f"real target tokens per {second}, label smoothing {smoothing:g}"
            rows = train(TrainingWork.of(SHAPES[shape], smoothing, device, WARM_UP + rounds), peers, rounds, report)
        else:
            workload = WORKLOADS[device.type]
            dtype = str(workload.dtype).removeprefix("torch.")
            unit = f"output tokens per {second}, {dtype} unless stated otherwise, at batch:beams, "
            unit += f"sources of about {workload.source} tokens, outputs of exactly {workload.output}"
            rows = decode(SHAPES[shape], workload, peers, rounds, device, report)
    finally:
        logging.disable(logging.NOTSET)
    return RaceReport(task, shape, rounds, device.type, unit, machine(device), rows)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the hardware and the software versions that a benchmark runs on."""
    facts: dict[str, Any] = {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: number for name in PACKAGES if (number := version(name))},
    }
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return facts
