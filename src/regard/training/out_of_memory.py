"""If memory runs out in a training step, compute its gradient in smaller parts, or advise on the batch size."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from regard.batch import Batch
from regard.errors import OutOfMemoryError, lacks_memory
from regard.training.executor import Eager, Emit, StepExecutor, StepResult, StepScalars, Update, UpdateMemoryError


class RowMemoryError(OutOfMemoryError):
    """Error when a single row of a batch does not fit into memory; the message describes the row."""


class SplitSteps(StepExecutor):
    """Runs steps by another executor. A step that runs out of memory is repeated with batches split into parts by rows.

    The gradient is summed over the parts and divided by the number of all labels, as in gradient accumulation. So it
    equals the gradient of the whole batches up to rounding, except that dropout draws other random numbers and that
    auxiliary losses are computed for each part. The number of parts of a shape is kept for later batches.
    """

    def __init__(self, inner: StepExecutor, update: Update, emit: Emit, parts: dict[str, int]) -> None:
        """`parts` maps shapes of batches to numbers of parts, and is changed when memory runs out."""
        self.inner, self.eager, self.emit, self.parts = inner, Eager(update), emit, parts

    def run(self, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> StepResult:
        while True:
            try:
                if all(shape(batch) not in self.parts for batch in batches):
                    return self.inner.run(batches, scalars, seed)
                return self.eager.run(*self._split(batches, scalars), seed)
            except UpdateMemoryError:
                raise
            except (MemoryError, RuntimeError) as error:
                if not lacks_memory(error):
                    raise
                why = str(error)
            # After the handler, because the error keeps all tensors of the step in memory.
            self.eager.update.optimizer.zero()
            self.inner.release()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._add_parts(batches, why)

    def _split(self, batches: Sequence[Batch], scalars: StepScalars) -> tuple[list[Batch], StepScalars]:
        """Return the parts of all batches that have labels, with the shares of the labels of the step."""
        pieces: list[Batch] = []
        shares: list[float | Tensor] = []
        for batch, share in zip(batches, scalars.shares, strict=True):
            whole = label_count(batch)
            for part in split(batch, self.parts.get(shape(batch), 1)):
                if labels := label_count(part):
                    pieces.append(part)
                    shares.append(share * (labels / whole))
        return pieces, StepScalars(scalars.labels, scalars.ema_decay, shares)

    def _add_parts(self, batches: Sequence[Batch], why: str) -> None:
        """Double the number of parts of the batches whose parts are the largest, if these have more than one row."""
        sizes = {
            shape(batch): (positions(batch) / self.parts.get(shape(batch), 1), len(batch.target))
            for batch in batches
            if self.parts.get(shape(batch), 1) < len(batch.target)
        }
        if not sizes:
            raise RowMemoryError(longest_row(batches))
        largest = max(sizes, key=lambda each: sizes[each])
        self.parts[largest] = min(2 * self.parts.get(largest, 1), sizes[largest][1])
        first_line = next(iter(why.splitlines()), "")
        self.emit("split", rows=sizes[largest][1], parts=self.parts[largest], shape=largest, why=first_line[:200])


def shape(batch: Batch) -> str:
    """Return the shape of a batch, such as "32x20/32x18" (source and target)."""
    sides = [side for side in (batch.source, batch.target) if side is not None]
    return "/".join("x".join(str(size) for size in side.shape[:2]) for side in sides)


def positions(batch: Batch) -> int:
    """Return the number of positions of a batch, in source and target together."""
    return sum(side.shape[0] * side.shape[1] for side in (batch.source, batch.target) if side is not None)


def label_count(batch: Batch) -> float:
    """Return the sum of the label weights of a batch; a row of a classification has one label."""
    if batch.labels is not None and batch.labels.dim() == 1:
        return float(len(batch.labels))
    if batch.weights is not None:
        return float(batch.weights.sum())
    return float(
        batch.target.shape[0] * batch.target.shape[1] if batch.target_seg is None else (batch.target_seg > 0).sum()
    )


def split(batch: Batch, parts: int) -> Iterator[Batch]:
    """Yield the rows of a batch in `parts` batches, whose numbers of rows differ by at most one."""
    rows = len(batch.target)
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    for part in range(parts):
        own = slice(rows * part // parts, rows * (part + 1) // parts)
        yield replace(batch, **{name: tensor[own] for name, tensor in tensors.items()})


def longest_row(batches: Sequence[Batch]) -> str:
    """Return a description of the longest row of the batches of a step."""
    lengths: list[tuple[int, int, str, str]] = []
    for number, batch in enumerate(batches, 1):
        for row in range(len(batch.target)):
            sides = {"source": row_length(batch.source, batch.source_seg, row)} if batch.source is not None else {}
            sides["target"] = row_length(batch.target, batch.target_seg, row)
            named = " and ".join(f"{length:,} {side}" for side, length in sides.items())
            lengths.append((sum(sides.values()), number, f"row {row + 1} of {len(batch.target)}", named))
    _, number, row, named = max(lengths)
    where = row if len(batches) == 1 else f"{row} in batch {number} of the step"
    return f"{where}, with {named} tokens,"


def row_length(values: Tensor | None, segments: Tensor | None, row: int) -> int:
    """Return the number of tokens of a row, without padding."""
    assert values is not None
    return values.shape[1] if segments is None else int((segments[row] > 0).sum())


@dataclass(frozen=True)
class MemoryShortage:
    """A training step that ran out of memory, and the batch size that should fit."""

    why: str  # torch's message
    device: torch.device
    tokens: int | None  # tokens per batch (data.batching.tokens)
    accumulate: int
    longest: int  # tokens of the longest example, which must fit into a batch
    row: str | None = None  # description of a row that does not fit alone

    def fitting_tokens(self) -> int:
        """Return a number of tokens per batch that should fit: at most half of the number that did not fit.

        The memory of a step grows with its number of tokens. The total memory that the step needed is unknown; only the
        memory in use when the allocation failed is known.
        """
        needed, total = self._needed(), self._total()
        share = min(0.5, 0.8 * total / needed) if needed and total else 0.5
        tokens = int((self.tokens or 0) * share)
        unit = 10 ** max(0, len(str(tokens)) - 2)  # rounds down to two digits
        return max(self.longest, tokens // unit * unit)

    def _needed(self) -> float:
        """Return the bytes in use at the peak plus the bytes of the failed allocation."""
        match = re.search(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)", self.why, re.IGNORECASE)
        units = {"bytes": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
        requested = float(match[1]) * units[match[2].lower()] if match else 0.0
        used = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return used + requested

    def _total(self) -> float:
        """Return the total memory of the device in bytes, or 0 if it is unknown."""
        if self.device.type == "cuda":
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        if self.device.type == "cpu" and hasattr(os, "sysconf"):
            return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        return 0.0

    def message(self, run: Path, saved: int | None) -> str:
        """Return the error message. `saved` is the step of the last checkpoint in the folder `run`, if there is one."""
        memory = self._total()
        what = f"memory ran out on {self.device}" + (f" ({memory / 2**30:.0f} GiB)" if memory else "")
        fitting = self.fitting_tokens()
        if self.row is not None:
            advice = f"{self.row} does not fit even alone; lower data.max_len, or choose a smaller model"
        elif self.tokens is None or fitting >= self.tokens:
            advice = f"one example of {self.longest} tokens is too much; lower data.max_len, or choose a smaller model"
        else:
            batches = self.accumulate * -(-self.tokens // fitting)
            advice = (
                f"a batch of {self.tokens:,} tokens is too much; try --set data.batching.tokens={fitting}, and "
                f"--set train.accumulate={batches} for as many tokens per step"
            )
        if saved is None:
            return f"{what}: {advice}"
        return (
            f"{what}: {advice}; the checkpoint of step {saved} is intact: continue from its weights with regard train "
            f"--from {run} and a smaller batch, or with regard resume {run} on a device with more memory"
        )
