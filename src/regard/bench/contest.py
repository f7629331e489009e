"""A race: contestants take turns at the same work, and what counts is the median of many short rounds."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from regard.errors import RegardError

WARM_UP = 2  # rounds that do not count: ours captures its decoding step in the second
RESAMPLES = 2000
LEEWAY = 0.03
Tell = Callable[[str], None]


class UnfairError(RegardError):
    """Two contestants do not do the same work."""


@dataclass(frozen=True)
class Contestant:
    """Somebody who works: ours have names that begin with "regard"."""

    name: str
    parameters: int
    turn: Callable[[int], int]  # the work of round n; how many real tokens it made
    memory_gb: float | None = None  # the most that it held on a GPU, building and warming up

    @property
    def ours(self) -> bool:
        """Whether it is regard itself."""
        return self.name.startswith("regard")


@dataclass(frozen=True)
class Row:
    """One contestant: medians over rounds, and the ratio to the fastest peer with its 95 % interval."""

    name: str
    tokens_per_second: float
    ratio: float | None  # None: no peer ran
    low: float | None
    high: float | None
    against: dict[str, float]  # the ratio to every peer, by name
    parameters: int
    memory_gb: float | None

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def race(contestants: Sequence[Contestant], rounds: int, device: torch.device, tell: Tell) -> list[Row]:
    """Every contestant's turn in every round: in an order drawn anew for two rounds, the second of them in reverse.

    On a CPU in seconds of the process, all threads together: what other processes do does not count. On a GPU in
    seconds of the wall.
    """
    names = [contestant.name for contestant in contestants]
    assert len(set(names)) == len(names), names
    rates = np.zeros((WARM_UP + rounds, len(contestants)))
    rng, order = np.random.default_rng(0), np.arange(len(contestants))
    gc.disable()
    try:
        for i in range(WARM_UP + rounds):
            gc.collect()
            order = order[::-1] if i % 2 else rng.permutation(len(contestants))
            for j in order.tolist():
                rates[i, j] = _rate(contestants[j].turn, i, device)
            seen = ", ".join(f"{name} {rate:,.0f}" for name, rate in zip(names, rates[i], strict=True))
            tell(f"round {i - WARM_UP + 1} of {rounds}: {seen}" if i >= WARM_UP else f"warming up: {seen}")
    finally:
        gc.enable()
    return summarise(contestants, rates[WARM_UP:])


def _rate(turn: Callable[[int], int], number: int, device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait(device)
    began = clock()
    tokens = turn(number)
    wait(device)
    return tokens / (clock() - began)


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarise(contestants: Sequence[Contestant], rates: np.ndarray) -> list[Row]:
    """Rows from rates (rounds, contestants): fastest peer first found by its median, then compared round by round."""
    medians = np.median(rates, 0)
    peers = [j for j, contestant in enumerate(contestants) if not contestant.ours]
    best = max(peers, key=lambda j: medians[j]) if peers else None
    drawn = np.random.default_rng(0).integers(0, len(rates), (RESAMPLES, len(rates)))
    rows = []
    for j, contestant in enumerate(contestants):
        ratio, low, high = None, None, None
        if best is not None:
            ratios = rates[:, j] / rates[:, best]
            ratio = float(np.median(ratios))
            low, high = (float(end) for end in np.percentile(np.median(ratios[drawn], 1), (2.5, 97.5)))
        against = {contestants[peer].name: float(np.median(rates[:, j] / rates[:, peer])) for peer in peers}
        speed, own = float(medians[j]), (contestant.parameters, contestant.memory_gb)
        rows.append(Row(contestant.name, speed, ratio, low, high, against, *own))
    return rows


def check_sizes(ours: int, contestants: Sequence[Contestant]) -> None:
    """Refuse a peer whose model is not as large as ours: some have a few biases less."""
    for contestant in contestants:
        if abs(contestant.parameters - ours) > LEEWAY * ours:
            raise UnfairError(
                f"{contestant.name} has {contestant.parameters:,} parameters and regard {ours:,}: not the same model"
            )
