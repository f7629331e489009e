"""The result of a race: rows, what it was run on, and the same as a table."""

import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from regard.bench.contest import WARM_UP, Row, Tell
from regard.bench.decode import LOADS, decode
from regard.bench.peers import Peer
from regard.bench.shapes import SHAPES
from regard.bench.train import Work, train
from regard.planner.threads import cpu
from regard.training.log import version

PACKAGES = ("torch", "transformers", "x-transformers", "fairseq-fixed", "joeynmt", "ctranslate2", "numpy")


@dataclass(frozen=True)
class Report:
    """What was raced, on what, and how it went."""

    task: str
    shape: str
    rounds: int
    device: str
    unit: str
    machine: dict[str, Any]
    rows: list[Row]

    def json(self) -> dict[str, Any]:
        """As one document."""
        values = {name: getattr(self, name) for name in ("task", "shape", "rounds", "device", "unit", "machine")}
        return values | {"rows": [row.record() for row in self.rows]}

    def headings(self) -> tuple[str, ...]:
        """What stands above the columns of `lines`."""
        memory = ("peak GB",) if any(row.memory_gb is not None for row in self.rows) else ()
        return "", "tokens/s", "ratio", "95 % interval", "parameters", *memory

    def lines(self) -> list[tuple[str, ...]]:
        """The rows as text."""
        return [_line(row)[: len(self.headings())] for row in self.rows]


def _line(row: Row) -> tuple[str, ...]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    interval = "-" if row.low is None or row.high is None else f"{row.low:.2f} .. {row.high:.2f}"
    memory = "-" if row.memory_gb is None else f"{row.memory_gb:.1f}"
    return row.name, f"{row.tokens_per_second:,.0f}", ratio, interval, f"{row.parameters:,}", memory


def run(
    task: str, shape: str, peers: Sequence[Peer], rounds: int, smoothing: float, device: torch.device, tell: Tell
) -> Report:
    """Race, and write down how it went. What peers log meanwhile, which is much, is not shown."""
    logging.disable(logging.WARNING)
    try:
        rows, unit = _raced(task, shape, peers, rounds, smoothing, device, tell)
    finally:
        logging.disable(logging.NOTSET)
    return Report(task, shape, rounds, device.type, unit, facts(device), rows)


def _raced(
    task: str, shape: str, peers: Sequence[Peer], rounds: int, smoothing: float, device: torch.device, tell: Tell
) -> tuple[list[Row], str]:
    """The rows, and what their numbers are."""
    second = "CPU second" if device.type == "cpu" else "second"
    if task == "train":
        rows = train(Work.of(SHAPES[shape], smoothing, device, WARM_UP + rounds), peers, rounds, tell)
        return rows, f"real target tokens a {second}, label smoothing {smoothing:g}"
    load = LOADS[device.type]
    settings = decode(SHAPES[shape], load, peers, rounds, device, tell)
    rows = [replace(row, name=f"{row.name} {s.batch}:{s.beams}") for s in settings for row in s.rows]
    lengths = f"sources of about {load.source} tokens, outputs of exactly {load.output}"
    kind = str(load.dtype).removeprefix("torch.")
    return rows, f"output tokens a {second}, {kind} but where said otherwise, at batch:beams, {lengths}"


def facts(device: torch.device) -> dict[str, Any]:
    """What a race was run on: without it its numbers say nothing."""
    known: dict[str, Any] = {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := version(name))},
    }
    if device.type == "cuda":
        known |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return known
