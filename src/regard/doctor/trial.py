"""Single training steps on chosen batches, to measure their memory and time.

The worst batch of an epoch is the one that needs the most memory, by its positions and the lengths of its examples. On
CUDA, the peak memory of a step is measured by torch's allocator, and the largest token budget is found by bisection. On
a CPU, running out of memory could end the process, so the bytes of live tensors are measured at two sizes, and the rest
is computed.
"""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from regard.bench.live_memory import peak_bytes
from regard.data.batching import Packing, Plan
from regard.data.loader import BatchLoader
from regard.data.objectives import Item
from regard.errors import lacks_memory
from regard.models.base import ModelSpec
from regard.planner.model_size import TRAINING
from regard.training.executor import StepScalars
from regard.training.trainer import Trainer

SAFE = 0.9  # share of the memory that a step may use
MOST = 16  # largest token budget that is tried, as a multiple of the planned one
EXACT = 0.05  # relative precision of the bisection
TIMED = 5  # number of typical batches that are timed
PATIENCE = 10.0  # seconds after which no further batch is timed
GROWN = 1.6  # factor by which memory may grow faster than the number of positions, before a step is tried on a CPU
Peak = int | None  # bytes, or None if memory ran out


@dataclass(frozen=True)
class Worst:
    """The worst batch of an epoch."""

    rows: int
    longest: dict[str, int]  # column -> tokens of its longest example
    places: int  # positions of all columns, including padding

    def __str__(self) -> str:
        lengths = " + ".join(f"{length:,}" for length in self.longest.values())
        return f"{self.rows:,} {'row' if self.rows == 1 else 'rows'} of {lengths} tokens"


class Trial:
    """Runs single training steps on chosen batches, and measures their memory and time."""

    def __init__(self, trainer: Trainer, model: ModelSpec) -> None:
        self.trainer, self.device = trainer, trainer.device
        self.width, self.heads = int(getattr(model, "d_model", 512)), int(getattr(model, "heads", 8))
        lengths = trainer.loader.examples.lengths.values()
        self.longest = max(int(column.max()) for column in lengths)
        self.places: dict[int, int] = {}  # token budget -> positions of its worst batch
        self.slope = 0.0  # bytes per position, from the first step
        self.slowest = 0.0  # seconds of the slowest step

    def loader(self, tokens: int) -> BatchLoader:
        """Return a loader whose batches have at most `tokens` tokens."""
        former = self.trainer.loader
        batching = replace(former.batching, tokens=tokens)  # type: ignore[call-arg]  # every batching has the field
        return BatchLoader(former.examples, batching, former.seed)

    def worst(self, tokens: int) -> list[tuple[Item, Worst]]:
        """Return the batches of the first epoch that may need the most memory, with `tokens` tokens per batch.

        The first one needs the most memory according to an estimate. The second one is the batch with the longest
        example, if that is another batch.
        """
        loader = self.loader(tokens)
        plan = loader.plan(0)
        sizes, longest, rows = batch_sizes(loader, plan)
        by_cost = int(self._cost(rows, longest).argmax())
        by_length = int(np.max(list(longest.values()), axis=0).argmax())
        self.places[tokens] = int(sizes[by_cost])
        found = []
        for number in dict.fromkeys((by_cost, by_length)):
            shape = {name: int(values[number]) for name, values in longest.items()}
            found.append((loader.item(plan, number), Worst(int(rows[number]), shape, int(sizes[number]))))
        return found

    def _cost(self, rows: np.ndarray, longest: dict[str, np.ndarray]) -> np.ndarray:
        """Return the relative memory of batches: activations of every position, and attention weights of every pair."""
        return rows * np.sum([n * (40.0 * self.width + self.heads * n) for n in longest.values()], axis=0)

    def step(self, item: Item) -> None:
        """Run one training step on a batch."""
        trainer, began = self.trainer, time.perf_counter()
        trainer.model.train()
        trainer.optimizer.set_rates(trainer.schedule().factor(1, max(1, trainer.steps)))
        labels = trainer.count_labels(item)
        result = trainer.executor.run([item.batch], StepScalars(float(labels), 0.0, [1.0]), seed=0)
        result.loss.item()  # waits for the device
        self.slowest = max(self.slowest, time.perf_counter() - began)

    def small_step(self) -> int:
        """Run a step on the smallest batch, which creates the optimizer state; return the bytes of all state."""
        loader = self.trainer.loader
        plan = loader.plan(0)
        sizes, _, _ = batch_sizes(loader, plan)
        item = loader.item(plan, int(sizes.argmin()))
        self.step(item)
        if self.device.type != "cuda":
            peak = peak_bytes(lambda: self.step(item), self.device)
            self.slope = peak / max(1, int(sizes.min()))
        return self.state_bytes()

    def state_bytes(self) -> int:
        """Return the bytes of weights, gradients, optimizer state and moving average."""
        weights = sum(tensor.nbytes for tensor in self.trainer.model.parameters())
        state = sum(tensor.nbytes for tensor in self.trainer.optimizer.state().values())
        average = 0 if self.trainer.ema is None else sum(tensor.nbytes for tensor in self.trainer.ema.values())
        return 2 * weights + state + average

    def peak(self, tokens: int, available: int, state: int) -> tuple[Peak, Worst, bool]:
        """Return the peak memory with `tokens` tokens per batch, the batch that needs it, and whether it was measured.

        On a CPU, only the first of the worst batches is tried, if it probably fits into the available memory.
        """
        if self.device.type == "cuda":
            return *self._largest_peak(tokens), True
        item, worst = self.worst(tokens)[0]
        peak, measured = self._peak_on_cpu(item, available, state)
        return peak, worst, measured

    def _largest_peak(self, tokens: int) -> tuple[Peak, Worst]:
        """Run a step on each of the worst batches on CUDA. Return the larger peak, and the batch that needs it."""
        peaks = [(self._cuda_peak(item), worst) for item, worst in self.worst(tokens)]
        return max(peaks, key=lambda found: math.inf if found[0] is None else found[0])

    def _peak_on_cpu(self, item: Item, available: int, state: int) -> tuple[int, bool]:
        expected = int(state + self.slope * item.places)
        if GROWN * expected > available:
            return expected, False
        return state + peak_bytes(lambda: self.step(item), self.device), True

    def _cuda_peak(self, item: Item) -> Peak:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            self.step(item)
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
        else:
            return int(torch.cuda.max_memory_reserved(self.device))
        # After the handler, because the error keeps all tensors of the step in memory.
        self.trainer.optimizer.zero()
        gc.collect()
        torch.cuda.empty_cache()
        return None

    def largest(self, tokens: int, peak: Peak, available: int) -> tuple[int | None, bool]:
        """Return the largest token budget whose worst batch fits, and whether it was measured."""
        if self.device.type != "cuda":
            return self._computed_largest(tokens, peak, available), False

        def fits(budget: int) -> bool:
            needed, _ = self._largest_peak(budget)
            return needed is not None and needed <= SAFE * available

        if peak is not None and peak <= SAFE * available:
            return bisect(fits, tokens, self.most(tokens)), True
        least = self.least
        if least >= tokens or not fits(least):
            return None, True
        return bisect(fits, least, tokens), True

    @property
    def least(self) -> int:
        """The smallest token budget, in which the longest example (or one row of fixed length) fits into a batch."""
        return max(self.longest, int(getattr(self.trainer.loader.batching, "length", 0)))

    def most(self, tokens: int) -> int:
        """Return the largest token budget to try: a multiple of the planned one, but no more than the whole text."""
        whole = max(int(column.sum()) for column in self.trainer.loader.examples.lengths.values())
        return max(tokens, min(MOST * tokens, whole))

    def _computed_largest(self, tokens: int, peak: Peak, available: int) -> int | None:
        """Return the largest token budget that should fit if memory is a linear function of the number of positions."""
        assert peak is not None
        half = max(self.least, tokens // 2)
        state = self.state_bytes()
        places = self.places[tokens]
        slope = (peak - state) / max(1, places)
        if half < tokens and GROWN * peak <= available and self.slowest < PATIENCE:
            smaller, _, measured = self.peak(half, available, state)
            assert smaller is not None
            if measured and self.places[half] < places:
                slope = max(slope / 2, (peak - smaller) / (places - self.places[half]))
        ratio = places / tokens
        room = int((SAFE * available - peak) / max(1e-9, slope) / ratio) + tokens
        return None if room < self.least else min(room, self.most(tokens)) // 64 * 64 or room

    def seconds(self) -> tuple[float, bool]:
        """Return the predicted seconds of the whole training, and whether typical batches were timed."""
        trainer, steps = self.trainer, self.trainer.spec.steps or 0
        plan = trainer.loader.plan(0)
        sizes, _, _ = batch_sizes(trainer.loader, plan)
        order = np.argsort(sizes)
        spread = order[np.linspace(0, len(order) - 1, TIMED + 2).astype(int)[1:-1]]
        spent, places = list[float](), 0
        for number in spread.tolist():
            if sum(spent) > PATIENCE:
                break
            item = trainer.loader.item(plan, number)
            began = time.perf_counter()
            self.step(item)
            spent.append(time.perf_counter() - began)
            places += item.places
        per_step = sum(spent) / max(1, places) * float(sizes.mean()) * trainer.spec.accumulate
        return steps * per_step / TRAINING, True


def batch_sizes(loader: BatchLoader, plan: Plan) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """Return for every batch of a plan its positions, the longest example of each column, and the number of rows."""
    rows = np.diff(plan.batches)
    shape = loader.batching.shape()
    if shape is not None:
        columns = len(loader.examples.lengths)
        longest = {name: np.full(len(rows), shape[1]) for name in loader.examples.lengths}
        count = np.full(len(rows), shape[0]) if isinstance(loader.batching, Packing) else rows
        return count * shape[1] * columns, longest, rows
    starts = plan.rows[plan.batches[:-1]]
    longest = {
        name: np.maximum.reduceat(lengths[plan.examples], starts) for name, lengths in loader.examples.lengths.items()
    }
    return rows * np.sum(list(longest.values()), axis=0), longest, rows


def bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest budget that fits between `low`, which is known to fit, and `high`, to within 5 %.

    The budget is doubled until it no longer fits. Then the interval is bisected.
    """
    while low < high:
        trial = min(high, 2 * low)
        if not fits(trial):
            high = trial
            break
        low = trial
    while high - low > max(1, EXACT * low):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
