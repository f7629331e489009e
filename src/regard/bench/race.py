"""A race: contestants take turns at the same work, and the median of many short rounds is compared."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from regard.errors import RegardError

WARM_UP = 2  # rounds that are not measured: regard captures its decoding step in the second
RESAMPLES = 2000
SIZE_TOLERANCE = 0.03
Report = Callable[[str], None]


class UnfairError(RegardError):
    """Two contestants do not do the same work."""


@dataclass(frozen=True)
class Contestant:
    """A model and its work; names of our own begin with "regard"."""

    name: str
    parameters: int
    turn: Callable[[int], int]  # does the work of round n and returns its number of real tokens
    memory_gb: float | None = None  # peak memory on a GPU, building and warming up

    @property
    def ours(self) -> bool:
        """True for regard itself."""
        return self.name.startswith("regard")


@dataclass(frozen=True)
class Row:
    """One contestant: medians over rounds, and the ratio to the fastest peer with its 95 % interval."""

    name: str
    tokens_per_second: float
    ratio: float | None  # None: no peer took part
    low: float | None
    high: float | None
    against: dict[str, float]  # the ratio to every peer, by name
    parameters: int
    memory_gb: float | None

    def record(self) -> dict[str, Any]:
        """The row as JSON."""
        return asdict(self)


def race(contestants: Sequence[Contestant], rounds: int, device: torch.device, report: Report) -> list[Row]:
    """Give every contestant a turn in every round, in random order; every second round reverses the order before it.

    Time is CPU time of the process on a CPU, so that other processes do not count, and wall-clock time on a GPU.
    """
    names = [contestant.name for contestant in contestants]
    assert len(set(names)) == len(names), names
    speeds = np.zeros((WARM_UP + rounds, len(contestants)))
    rng, order = np.random.default_rng(0), np.arange(len(contestants))
    gc.disable()
    try:
        for i in range(WARM_UP + rounds):
            gc.collect()
            order = order[::-1] if i % 2 else rng.permutation(len(contestants))
            for j in order.tolist():
                speeds[i, j] = _speed(contestants[j].turn, i, device)
            results = ", ".join(f"{name} {speed:,.0f}" for name, speed in zip(names, speeds[i], strict=True))
            report(f"round {i - WARM_UP + 1} of {rounds}: {results}" if i >= WARM_UP else f"warming up: {results}")
    finally:
        gc.enable()
    return summarise(contestants, speeds[WARM_UP:])


def _speed(turn: Callable[[int], int], number: int, device: torch.device) -> float:
    """Tokens per second of one turn."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait(device)
    start = clock()
    tokens = turn(number)
    wait(device)
    return tokens / (clock() - start)


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarise(contestants: Sequence[Contestant], speeds: np.ndarray) -> list[Row]:
    """Rows from speeds (rounds, contestants): each compared, round by round, with the peer of the highest median."""
    medians = np.median(speeds, 0)
    peers = [j for j, contestant in enumerate(contestants) if not contestant.ours]
    best = max(peers, key=lambda j: medians[j]) if peers else None
    resampled = np.random.default_rng(0).integers(0, len(speeds), (RESAMPLES, len(speeds)))
    rows = []
    for j, contestant in enumerate(contestants):
        ratio, low, high = None, None, None
        if best is not None:
            ratios = speeds[:, j] / speeds[:, best]
            ratio = float(np.median(ratios))
            low, high = (float(end) for end in np.percentile(np.median(ratios[resampled], 1), (2.5, 97.5)))
        against = {contestants[peer].name: float(np.median(speeds[:, j] / speeds[:, peer])) for peer in peers}
        size = (contestant.parameters, contestant.memory_gb)
        rows.append(Row(contestant.name, float(medians[j]), ratio, low, high, against, *size))
    return rows


def check_sizes(ours: int, contestants: Sequence[Contestant]) -> None:
    """Refuse a peer whose model differs in size by more than a few biases."""
    for contestant in contestants:
        if abs(contestant.parameters - ours) > SIZE_TOLERANCE * ours:
            raise UnfairError(
                f"{contestant.name} has {contestant.parameters:,} parameters and regard {ours:,}: not the same model"
            )
