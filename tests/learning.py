"""Thresholds on what a model has learned: asserted with a wide margin, and measured by `make test-margins`."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from regard.batch import Batch, translation
from regard.models.base import ModelSpec, build

MARGIN = 3.0  # a value this close to its threshold depends on the machine: the order of its additions is enough
Task = Callable[[random.Random, int], Batch]


class Learned:
    """Assert that a measure of error is far below a threshold, and record it where REGARD_MARGINS names a file.

    The error of one training depends on rounding, hence on the CPU, the number of threads and the libraries. So a
    threshold stands at least `MARGIN` above the error and below that of a model that lacks the part under test;
    `bench/margins.py` measures the former in many settings, each with seeds of its own (REGARD_SEED_OFFSET).
    """

    def __init__(self, test: str) -> None:
        self.test = test

    @staticmethod
    def seeds(count: int) -> list[int]:
        """Random seeds of `count` trainings."""
        first = int(os.environ.get("REGARD_SEED_OFFSET", "0")) * count
        return [*range(first, first + count)]

    def __call__(self, quantity: str, *errors: float, below: float, broken: float) -> None:
        """Assert that the median of `errors` is `below` a threshold; `broken` is the error without the part."""
        assert below < broken, "a model without the part would pass"
        value = median(errors)
        if path := os.environ.get("REGARD_MARGINS"):
            line = {"test": self.test, "quantity": quantity, "value": value, "threshold": below, "broken": broken}
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        assert value < below, f"{quantity}: {value:.4g} (of {errors}), where below {below:g} was expected"


def wrong_tokens(spec: ModelSpec, task: Task, seed: int, *, steps: int, rate: float) -> float:
    """Share of held-out tokens that a model predicts wrongly after `steps` of Adam on fresh batches of a task.

    The learning rate falls to zero: at a constant one the error jumps up again and again, and where it stands after
    the last step is chance.
    """
    torch.set_default_dtype(torch.float32)
    model: Any = build(spec, seed=seed)
    rng = random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        loss = model.loss(task(rng, 24))
        optimizer.zero_grad()
        (loss.total / loss.tokens).backward()
        optimizer.step()
        schedule.step()
    batch = task(rng, 100)
    assert batch.target_seg is not None
    with torch.no_grad():
        wrong = model.eval().log_probs(batch).argmax(-1) != batch.labels
    return wrong[batch.target_seg != 0].double().mean().item()


def copying(*lengths: int) -> Task:
    """Random tokens of six kinds, as many as one of `lengths` says, to be repeated."""
    return lambda rng, rows: translation([(text, text) for text in _texts(rng, rows, lengths)])


def reversing(*lengths: int) -> Task:
    """Random tokens of six kinds, as many as one of `lengths` says, to be repeated backwards."""
    return lambda rng, rows: translation([(text, text[::-1]) for text in _texts(rng, rows, lengths)])


def _texts(rng: random.Random, rows: int, lengths: tuple[int, ...]) -> list[list[int]]:
    return [[rng.randrange(3, 9) for _ in range(rng.choice(lengths))] for _ in range(rows)]
