"""Compare results of training with thresholds that have a wide margin, which `make test-margins` measures."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from regard.batch import Batch, translation
from regard.models.base import ModelSpec
from regard.models.build import build

Task = Callable[[random.Random, int], Batch]


class Learned:
    """Compare a result of training with a threshold, and append it to the file REGARD_MARGINS if that is set.

    The result of training depends on rounding, and so on the CPU, the number of threads and the libraries. So the
    threshold is at least three times worse than the usual result, and better than the result of a model without the
    part under test. `bench/margins.py` measures this in many settings with different seeds (REGARD_SEED_OFFSET).
    """

    def __init__(self, test: str) -> None:
        self.test = test

    @staticmethod
    def seeds(count: int) -> list[int]:
        """Return the random seeds for training `count` models."""
        first = int(os.environ.get("REGARD_SEED_OFFSET", "0")) * count
        return [*range(first, first + count)]

    def __call__(
        self, quantity: str, *values: float, broken: float, below: float | None = None, above: float | None = None
    ) -> None:
        """Assert that the median of `values` is `below` or `above` a threshold. `broken`: value without the part."""
        threshold, sign = (below, 1) if below is not None else (above, -1)
        assert threshold is not None
        assert sign * threshold < sign * broken, "a model without the part would pass"
        value = median(values)
        if path := os.environ.get("REGARD_MARGINS"):
            about = {"test": self.test, "quantity": quantity, "below": sign > 0}
            line = about | {"value": value, "threshold": threshold, "broken": broken}
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        assert sign * value < sign * threshold, f"{quantity}: {value:.4g} of {values}, where the limit is {threshold:g}"


def wrong_tokens(spec: ModelSpec, task: Task, seed: int, *, steps: int, rate: float) -> float:
    """Train with `steps` steps of Adam on new batches of a task, and return the error rate on held-out tokens.

    The learning rate falls to zero. With a constant learning rate the error jumps up again and again, so the error
    after the last step would depend on chance.
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
        is_wrong = model.eval().log_probs(batch).argmax(-1) != batch.labels
    return is_wrong[batch.target_seg != 0].double().mean().item()


def copying(*lengths: int) -> Task:
    """Return the task of copying random sequences, whose lengths are drawn from `lengths`, over six tokens."""
    return lambda rng, rows: translation([(text, text) for text in _texts(rng, rows, lengths)])


def reversing(*lengths: int) -> Task:
    """Return the task of reversing random sequences, whose lengths are drawn from `lengths`, over six tokens."""
    return lambda rng, rows: translation([(text, text[::-1]) for text in _texts(rng, rows, lengths)])


def _texts(rng: random.Random, rows: int, lengths: tuple[int, ...]) -> list[list[int]]:
    return [[rng.randrange(3, 9) for _ in range(rng.choice(lengths))] for _ in range(rows)]
