"""The length benchmark: time, memory and FLOPs of a training step by sequence length, for many kinds of layers."""

import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from regard import fast
from regard.batch import Batch
from regard.bench.live_memory import peak_bytes
from regard.bench.long_flops import step_flops
from regard.bench.long_models import LongModel, Size, parameters
from regard.bench.race import Report, orders, timed
from regard.bench.recall import RecallReport, RecallTask, recall
from regard.bench.report import machine
from regard.errors import SpecError, lacks_memory
from regard.models.build import build

SHORTEST = 256
FITTED = ("seconds", "peak_bytes")
LATE = "out of time: --max-time was over"


@dataclass(frozen=True)
class LengthWork:
    """The work of the benchmark on one device: model size, longest sequence and batch size.

    A batch has the same number of rows at every length. The number is chosen so that a batch has about `filling` tokens
    at the length `fitted_from`. From this length on, the time of a step is therefore limited by computation and not by
    kernel launches.
    """

    device: torch.device
    size: Size
    longest: int
    fit: int  # exponents are fitted from this length on, from which sparse kernels are used
    filling: int
    limit: float  # seconds: see `measure`
    rounds: int
    deadline: float = math.inf  # a `time.monotonic()`: see `measure`
    shortest: int = SHORTEST

    @property
    def lengths(self) -> list[int]:
        """Sequence lengths: `shortest`, twice as many tokens, ... up to `longest`, and `longest` itself."""
        powers = [self.shortest * 2**i for i in range(max(0, math.ceil(math.log2(self.longest / self.shortest))))]
        return [*powers, self.longest]

    @property
    def fitted_from(self) -> int:
        """The shortest sequence length of the exponent fit: at least `fit` or `longest` / 4, whichever is less."""
        return next(length for length in self.lengths if length >= min(self.fit, self.longest / 4))

    @property
    def rows(self) -> int:
        """Number of rows of a batch."""
        return max(1, round(self.filling / self.fitted_from))


@dataclass(frozen=True)
class LengthRow:
    """One model at one length. Seconds, memory and FLOPs are those of a training step on a batch of `batch_rows` rows.

    `failed` is the reason why a number is missing.
    """

    name: str
    title: str
    length: int
    batch_rows: int
    parameters: int
    seconds: float | None = None  # median over the rounds
    peak_bytes: int | None = None
    flops: float | None = None
    rounds: int = 0
    failed: str | None = None


@dataclass(frozen=True)
class Runner:
    """A model that is ready for training steps on a batch of one length."""

    row: LengthRow
    step: Callable[[], None]


WORKS = {
    "cpu": LengthWork(torch.device("cpu"), Size(4, 32, 2, 64, 64, 32), 8192, 2048, 2048, 4.0, 3),
    "cuda": LengthWork(torch.device("cuda"), Size(4, 512, 8, 512, 64, 256), 65_536, 8192, 32_768, 10.0, 5),
}


def work_on(
    device: torch.device, longest: int | None, limit: float | None, rounds: int | None, shortest: int | None = None
) -> LengthWork:
    """Return the work of the benchmark on a device. Arguments that are None keep their default values."""
    if shortest is not None and shortest < SHORTEST:
        raise SpecError("--min", f"must be at least {SHORTEST}, not {shortest}")
    if limit is not None and not limit > 0.0:
        raise SpecError("--limit", f"must be more than 0, not {limit:g}")
    given = {"longest": longest, "limit": limit, "rounds": rounds, "shortest": shortest}
    work = replace(WORKS[device.type], device=device, **{name: n for name, n in given.items() if n is not None})
    if work.longest < work.shortest:
        raise SpecError("--max", f"must be at least {work.shortest}, the shortest sequence (--min), not {work.longest}")
    return work


def measure(models: Sequence[LongModel], work: LengthWork, report: Report) -> list[LengthRow]:
    """Run training steps of all models at all lengths, and return one row per model and length.

    A model that runs out of memory is left out at longer lengths. A model is also left out if its step would probably
    take more than `work.limit` seconds. The time is estimated from the previous length, as if it were proportional to
    the length. At each length, the steps of the models are timed in turn, in `work.rounds` rounds. A model takes part
    until its steps have taken `work.limit` seconds at this length.

    After `work.deadline`, no more models are measured, and there is one round at most.
    """
    rows: dict[tuple[str, int], LengthRow] = {}
    last: dict[str, LengthRow] = {}
    for length in work.lengths:
        runners = []
        for model in models:
            row = rows[model.name, length] = _skipped(model, work, length, last.get(model.name))
            if row.failed is None:
                runner = prepare(row, model, work)
                row = rows[model.name, length] = runner if isinstance(runner, LengthRow) else runner.row
                runners += [runner] if isinstance(runner, Runner) else []
            report(_progress(row))
            last[model.name] = row
        for row in _raced(runners, work):
            rows[row.name, length] = last[row.name] = row
        report(f"{length:,} tokens: {work.rounds} rounds of {len(runners)} models")
        runners.clear()
        _release(work.device)
    return [rows[model.name, length] for model in models for length in work.lengths]


def _skipped(model: LongModel, work: LengthWork, length: int, last: LengthRow | None) -> LengthRow:
    """Return a row without numbers. Its field `failed` is the reason to skip the model at this length, or None."""
    failed = None if last is None else last.failed
    if time.monotonic() > work.deadline:
        failed = failed or LATE
    elif last is not None and last.seconds is not None and last.seconds * length / last.length > work.limit:
        failed = (
            f"out of time: a step takes {last.seconds:.3g} s at {last.length:,} tokens and would take at least "
            f"{last.seconds * length / last.length:.3g} s, more than the limit of {work.limit:g} s"
        )
    count = parameters(build(model.spec(work.size, length), device="meta"))
    return LengthRow(model.name, model.title, length, work.rows, count, failed=failed)


def prepare(row: LengthRow, model: LongModel, work: LengthWork) -> Runner | LengthRow:
    """Run two training steps. Return a `Runner` for further steps, with the memory and time of the second step.

    If a step fails, return a row with the reason instead.
    """
    try:
        step = training_step(model, work, row.length)
        step()
        (peak, seconds) = timed(lambda: peak_bytes(step, work.device), work.device)
        flops = work.rows * step_flops(model, work.size, row.length)
        return Runner(replace(row, seconds=seconds, peak_bytes=peak, flops=flops, rounds=1), step)
    except Exception as error:  # whatever it is, the other models are measured
        failed = _reason(error, row.length)
    _release(work.device)
    return replace(row, failed=failed)


def _reason(error: Exception, length: int) -> str:
    if lacks_memory(error):
        return f"out of memory at {length:,} tokens"
    return f"error at {length:,} tokens: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def training_step(model: LongModel, work: LengthWork, length: int) -> Callable[[], None]:
    """Return a function that computes the loss of a batch and its gradients: in bfloat16 on CUDA, else in float32.

    Every call builds the attention masks, once for all layers, as in training. The optimizer is left out, because its
    time does not depend on the length.
    """
    built = build(model.spec(work.size, length), seed=1).to(work.device).train()
    fast.install(built, work.device)
    rng = torch.Generator().manual_seed(length)
    ids = torch.randint(work.size.vocab, (work.rows, length + 1), generator=rng)
    weights = torch.ones(work.rows, length) if model.encoder else None
    batch = Batch(ids[:, :-1], ids[:, 1:], weights=weights).to(work.device)

    def step() -> None:
        on_gpu = work.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = built.loss(batch)
            (loss.total / loss.tokens).backward()
        nn.Module.zero_grad(built, set_to_none=True)

    return step


def _raced(runners: Sequence[Runner], work: LengthWork) -> list[LengthRow]:
    """Measure the steps of all models in rounds, and return their rows with the median seconds."""
    seconds: list[list[float]] = [[] for _ in runners]
    failed: dict[int, str] = {}
    gc.disable()
    try:
        for number, order in enumerate(orders(work.rounds, len(runners))):
            if number and time.monotonic() > work.deadline:
                break
            gc.collect()
            for j in order:
                if j in failed or sum(seconds[j]) > work.limit:
                    continue
                try:
                    seconds[j].append(timed(runners[j].step, work.device)[1])
                except Exception as error:
                    failed[j] = _reason(error, runners[j].row.length)
    finally:
        gc.enable()
    rows = []
    for j, runner in enumerate(runners):
        if j in failed:
            rows.append(replace(runner.row, seconds=None, rounds=0, failed=failed[j]))
        else:
            rows.append(replace(runner.row, seconds=float(np.median(seconds[j])), rounds=len(seconds[j])))
    return rows


def _release(device: torch.device) -> None:
    """Free the memory of models that are no longer used, and discard compiled kernels."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def _progress(row: LengthRow) -> str:
    if row.failed is not None or row.peak_bytes is None:
        return f"{row.length:,} tokens, {row.title}: {row.failed}"
    return f"{row.length:,} tokens, {row.title}: {row.seconds:.3g} s, {row.peak_bytes / 1e6:,.0f} MB"


def exponent(lengths: Sequence[int], values: Sequence[int | float]) -> float | None:
    """Return b of the power law a * length^b: a least-squares fit to the logarithms. None for fewer than 2 points."""
    if len(lengths) < 2:
        return None
    x, y = np.log(lengths), np.log(values)
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def exponents(rows: Sequence[LengthRow], fitted_from: int) -> dict[str, dict[str, float | None]]:
    """Return the exponents of seconds and peak memory by model, from the lengths of at least `fitted_from` tokens."""
    fits: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name and row.length >= fitted_from]
        fits[name] = {
            field: exponent(*_points([(row.length, getattr(row, field)) for row in mine])) for field in FITTED
        }
    return fits


def _points(pairs: Sequence[tuple[int, int | float | None]]) -> tuple[list[int], list[int | float]]:
    known = [(x, y) for x, y in pairs if y]
    return [x for x, _ in known], [y for _, y in known]


def run(
    models: Sequence[LongModel], work: LengthWork, task: RecallTask | None, report: Report, *, costs: bool = True
) -> "LengthReport":
    """Measure time and memory if `costs` is true, and train the models on the recall task if it is given."""
    rows = measure(models, work, report) if costs else []
    recalled = None if task is None else recall(models, task, work.device, report, work.deadline)
    fits = exponents(rows, work.fitted_from)
    facts = (work.rounds, work.longest, work.fitted_from, work.rows, work.size, machine(work.device))
    return LengthReport(work.device.type, *facts, rows, fits, recalled)


@dataclass(frozen=True)
class LengthReport:
    """The result of the benchmark: the machine, a row per model and length, exponents, and accuracies by distance."""

    device: str
    rounds: int
    longest: int
    fitted_from: int
    batch_rows: int
    size: Size
    machine: Mapping[str, Any]
    rows: Sequence[LengthRow]
    exponents: Mapping[str, Mapping[str, float | None]]
    recall: RecallReport | None  # None: it was not measured
    task: str = "length"

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object. `accuracy` has the accuracies of each model by distance."""
        record = asdict(self)
        accuracy = {} if self.recall is None else {row.name: dict(row.accuracy) for row in self.recall.rows}
        return record | {"unit": self.unit, "accuracy": accuracy}

    @property
    def unit(self) -> str:
        second = "CPU seconds" if self.device == "cpu" else "seconds"
        return (
            f"{second}, bytes and FLOPs of a training step (forward and backward) on a batch of {self.batch_rows} "
            f"sequence{'s' if self.batch_rows > 1 else ''}; exponents fitted from {self.fitted_from:,} to "
            f"{self.longest:,} tokens"
        )

    def failures(self) -> list[str]:
        """Return one sentence for each model that was not measured at all lengths."""
        sentences = {}
        for row in self.rows:
            if row.failed is not None:
                sentences.setdefault(
                    row.name, f"{row.title} was not measured from {row.length:,} tokens on: {row.failed}"
                )
        return list(sentences.values())
