"""Prove that training fits the device: run one step on the worst batch, and find the largest batch that fits.

The worst batch of an epoch is the one with the most positions, among those with the longest examples. On CUDA, the peak
memory of a step is measured by torch's allocator, and the largest token budget is found by bisection. On a CPU, running
out of memory could end the process, so the bytes of live tensors are measured at two sizes, and the rest is computed.
"""

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.bench.live_memory import peak_bytes
from regard.data.batching import Packing, Plan
from regard.data.cache import Cache
from regard.data.loader import BatchLoader
from regard.data.objectives import Item
from regard.data.prepare import ROOM, Prepared, prepare
from regard.errors import DataError, lacks_memory
from regard.models.base import ModelSpec
from regard.planner.model_size import TRAINING
from regard.planner.speed import hardware, memory
from regard.planner.threads import quiet
from regard.recipe.recipe import Recipe, RecipeRequest
from regard.runs.assemble import assemble
from regard.runs.request import check_request
from regard.runs.resolve import resolve
from regard.runs.trained_model import choose_device
from regard.training.checkpoint import RunFolder
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


@dataclass(frozen=True)
class Probe:
    """What a training run needs: memory, time and disk space. Sizes are in bytes."""

    device: str
    parameters: int
    steps: int
    tokens: int  # the planned token budget of a batch
    worst: Worst
    peak: Peak
    measured: bool  # False: the peak is computed, not measured
    available: int
    largest: int | None  # the largest token budget that fits, or None if not even the longest example does
    largest_measured: bool
    capped: bool  # True: no larger budget was tried
    longest: int  # tokens of the longest example
    seconds: float  # of the whole training, without a time limit
    limit: float | None  # the time limit in seconds
    timed: bool  # True: typical batches were timed on this device
    checkpoint: int
    disk: int  # of a whole run folder
    left_out: int  # examples that are longer than the limit
    examples: int
    plan: tuple[str, ...]  # what was chosen, and why

    @property
    def fits(self) -> bool:
        """True if the worst batch fits into the memory of the device."""
        return self.peak is not None and self.peak <= SAFE * self.available

    def record(self) -> dict[str, Any]:
        """Return the measurements as a JSON object."""
        return asdict(self) | {"fits": self.fits}


def probe(request: RecipeRequest, device: str = "auto", report: Callable[[str], None] = lambda _: None) -> Probe:
    """Plan the training of a request, run one step on its worst batch, and predict time, memory and disk space."""
    chosen = choose_device(device)
    check_request(request)
    with tempfile.TemporaryDirectory(prefix="regard-doctor-") as name:
        folder = RunFolder(name)
        room = ROOM if chosen.type == "cuda" else ROOM // 2
        data = prepare(request.data, folder.data, request.train.seed, None, report, Cache.default(), room)
        reasons = list(data.report)
        report("planning")
        recipe = resolve(request, data, chosen, reasons.append, hardware=hardware(chosen, keep=quiet()))
        report(f"running the worst batch on {chosen}")
        return _measured(recipe, data, folder, chosen, tuple(reasons))


def _measured(
    recipe: Recipe, data: Prepared, folder: RunFolder, device: torch.device, reasons: tuple[str, ...]
) -> Probe:
    trainer = assemble(recipe, data, folder, device)
    trial = Trial(trainer, recipe.model)
    tokens = getattr(recipe.data.batching, "tokens", None) or 0
    available = available_memory(device)
    item, worst = trial.worst(tokens)
    first = trial.small_step()
    peak, measured = trial.peak(item, available, first)
    largest, largest_measured = trial.largest(tokens, peak, available)
    seconds, timed = trial.seconds()
    checkpoint, disk = _disk(trainer, folder)
    return Probe(
        device=str(device),
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        steps=recipe.train.steps or 0,
        tokens=tokens,
        worst=worst,
        peak=peak,
        measured=measured,
        available=available,
        largest=largest,
        largest_measured=largest_measured,
        capped=largest is not None and largest >= trial.most(tokens) // 64 * 64,
        longest=trial.longest,
        seconds=seconds,
        limit=recipe.train.time,
        timed=timed,
        checkpoint=checkpoint,
        disk=disk,
        left_out=data.survey.long,
        examples=data.survey.records,
        plan=reasons,
    )


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

    def worst(self, tokens: int) -> tuple[Item, Worst]:
        """Return the batch of the first epoch with the most positions, with `tokens` tokens per batch."""
        loader = self.loader(tokens)
        plan = loader.plan(0)
        sizes, longest, rows = batch_sizes(loader, plan)
        number = int(self._cost(rows, longest).argmax())
        shape = {name: int(values[number]) for name, values in longest.items()}
        self.places[tokens] = int(sizes[number])
        return loader.item(plan, number), Worst(int(rows[number]), shape, int(sizes[number]))

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

    def peak(self, item: Item, available: int, state: int) -> tuple[Peak, bool]:
        """Return the peak memory of a step, and whether it was measured.

        On a CPU, a step that would probably need more than the available memory is not run.
        """
        if self.device.type == "cuda":
            return self._cuda_peak(item), True
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
            needed = self._cuda_peak(self.worst(budget)[0])
            return needed is not None and needed <= SAFE * available

        if peak is not None and peak <= SAFE * available:
            return bisect(fits, tokens, self.most(tokens)), True
        least = self.least
        if least >= tokens or not fits(least):
            return None, True
        return bisect(fits, least, tokens), True

    @property
    def least(self) -> int:
        """The smallest token budget: the longest example, or a row of fixed length, must fit into a batch."""
        return max(self.longest, int(getattr(self.trainer.loader.batching, "length", 0)))

    def most(self, tokens: int) -> int:
        """Return the largest token budget to try: a multiple of the planned one, but no more than the whole text."""
        whole = max(int(column.sum()) for column in self.trainer.loader.examples.lengths.values())
        return max(tokens, min(MOST * tokens, whole))

    def _computed_largest(self, tokens: int, peak: Peak, available: int) -> int | None:
        """Return the budget at which memory, which grows with the number of positions, reaches its limit."""
        assert peak is not None
        half = max(self.least, tokens // 2)
        state = self.state_bytes()
        places = self.places[tokens]
        slope = (peak - state) / max(1, places)
        if half < tokens and GROWN * peak <= available and self.slowest < PATIENCE:
            item, _ = self.worst(half)
            smaller, measured = self.peak(item, available, state)
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
    """Return the largest budget from `low`, which fits, to `high`, to within 5 %. Larger budgets are doubled first."""
    while low < high:
        trial = min(high, 2 * low)
        if not fits(trial):
            high = trial
            break
        low = trial
    while high > low * (1 + EXACT):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def available_memory(device: torch.device) -> int:
    """Return the bytes that a process may use: free GPU memory, or the available main memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    return int(min(memory(device), *_limits()))


def _limits() -> Iterator[float]:
    """Yield the available memory of the system, and the rest of the limit of the control group."""
    with_default = float("inf")
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        yield 1024.0 * int(rows["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):
        yield with_default
    group = Path("/sys/fs/cgroup")
    try:
        yield float((group / "memory.max").read_text()) - float((group / "memory.current").read_text())
    except (OSError, ValueError):  # there is no control group, or it has no limit ("max")
        yield with_default


def _disk(trainer: Trainer, folder: RunFolder) -> tuple[int, int]:
    """Return the bytes of one checkpoint and of the whole run folder."""
    spec = trainer.spec
    weights = sum(tensor.nbytes for tensor in trainer.model.state_dict().values())
    state = sum(tensor.nbytes for tensor in trainer.optimizer.state().values()) + weights * bool(spec.ema)
    data = sum(path.stat().st_size for path in folder.data.rglob("*") if path.is_file())
    every = spec.validate_every or spec.save_every or spec.steps or 1
    kept = min(spec.keep + spec.average, max(1, (spec.steps or 0) // every))
    # One more checkpoint while it is written beside the previous one; and the final weights.
    return weights + state, (kept + 2) * weights + 2 * state + data


def free_space(folder: str | Path = ".") -> int:
    """Return the free bytes of the file system of a folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from None
