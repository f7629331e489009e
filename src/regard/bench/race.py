"""Benchmarks: libraries do the same work in turn, and their median speeds over many short rounds are compared."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from regard.errors import RegardError

WARM_UP = 3  # rounds that are not measured: on a GPU, regard captures its encoder in the third one
RESAMPLES = 2000
SIZE_TOLERANCE = 0.03
Report = Callable[[str], None]
T = TypeVar("T")


class UnfairError(RegardError):
    """Raised if two benchmarked models do not do the same work."""


@dataclass(frozen=True)
class Contestant:
    """A benchmarked model and the work that it does in each round. Names of regard's models begin with "regard"."""

    name: str
    parameters: int
    turn: Callable[[int], int]  # does the work of round n and returns the number of tokens without padding
    memory_gb: float | None = None  # peak memory on a GPU, including construction and warm-up

    @property
    def ours(self) -> bool:
        """True if the model is regard's."""
        return self.name.startswith("regard")


@dataclass(frozen=True)
class Row:
    """One model in the results: the median speed, and the ratio to the fastest other library with a 95 % interval."""

    name: str
    tokens_per_second: float
    ratio: float | None  # None: no peer took part
    low: float | None
    high: float | None
    against: dict[str, float]  # the ratio to every peer, by name
    parameters: int
    memory_gb: float | None

    def record(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return asdict(self)


def race(contestants: Sequence[Contestant], rounds: int, device: torch.device, report: Report) -> list[Row]:
    """Run all benchmarked models in every round, and return one table row per model.

    The order within a round is random, and every second round reverses the order of the round before. On a CPU, the
    CPU time of the process is measured, so that other processes do not count. On a GPU, wall-clock time is measured.
    """
    names = [contestant.name for contestant in contestants]
    assert len(set(names)) == len(names), names
    speeds = np.zeros((WARM_UP + rounds, len(contestants)))
    gc.disable()
    try:
        for i, order in enumerate(orders(WARM_UP + rounds, len(contestants))):
            gc.collect()
            for j in order:
                speeds[i, j] = _speed(contestants[j].turn, i, device)
            results = ", ".join(f"{name} {speed:,.0f}" for name, speed in zip(names, speeds[i], strict=True))
            report(f"round {i - WARM_UP + 1} of {rounds}: {results}" if i >= WARM_UP else f"warming up: {results}")
    finally:
        gc.enable()
    return summarise(contestants, speeds[WARM_UP:])


def orders(rounds: int, count: int) -> Iterator[list[int]]:
    """Yield the order of `count` models in each round: random, and reversed in every second round."""
    rng, order = np.random.default_rng(0), np.arange(count)
    for i in range(rounds):
        order = order[::-1] if i % 2 else rng.permutation(count)
        yield order.tolist()


def _speed(turn: Callable[[int], int], number: int, device: torch.device) -> float:
    """Return the tokens per second of `turn(number)`, the work of one model in one round."""
    tokens, seconds = timed(lambda: turn(number), device)
    return tokens / seconds


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Do the work, and return its result and its duration in seconds: CPU time, or elapsed time on a GPU."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait(device)
    start = clock()
    result = work()
    wait(device)
    return result, clock() - start


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarise(contestants: Sequence[Contestant], speeds: np.ndarray) -> list[Row]:
    """Return one table row per benchmarked model, from `speeds` of shape (rounds, models).

    Each model is compared, round by round, with the peer (another library) that has the highest median speed.
    """
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
    """Raise `UnfairError` if the parameter count of a model differs from `ours` by more than a few biases."""
    for contestant in contestants:
        if abs(contestant.parameters - ours) > SIZE_TOLERANCE * ours:
            raise UnfairError(
                f"the models differ: {contestant.name} has {contestant.parameters:,} parameters, but regard {ours:,}"
            )
