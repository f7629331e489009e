"""Steps whose loss or gradient is not finite: they change no weights, and their batches are stored for inspection."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.batch import Batch
from regard.data.loader import BatchLoader
from regard.errors import DataError
from regard.training.checkpoint import RunFolder, finite, read_json, saving, write_json
from regard.training.log_window import StepRecord
from regard.training.tensor_files import read_tensors, write_tensors

MOST = 10  # number of skipped steps whose batches are stored

Decoders = Mapping[str, Callable[[Sequence[int]], str]]  # "source" or "target" -> function that decodes token ids


def not_finite(record: StepRecord, scaled: bool) -> str | None:
    """Return which number of a step is not finite, or None if the step changed the weights.

    If `scaled` is true, training is in float16. An overflow of the gradient is then usual: the loss scale is lowered.
    """
    if not math.isfinite(record.loss):
        return f"the loss is {record.loss}"
    return None if scaled or math.isfinite(record.gradient) else f"the gradient is {record.gradient}"


def store(
    folder: RunFolder, loader: BatchLoader, record: StepRecord, accumulate: int, decoders: Decoders
) -> str | None:
    """Store the batches of a skipped step, and return the name of the file; store nothing after `MOST` steps.

    `skipped-STEP.json` has the ids and texts of all examples, and `skipped-STEP.safetensors` the tensors.
    """
    path = folder.skipped(record.step, "json")
    if sum(other.name < path.name for other in folder.path.glob("skipped-*.json")) >= MOST:
        return None
    # A copy, because the loader itself is in use by the thread that prepares the next batches.
    items = islice(copy(loader).after(record.place), accumulate)
    batches = [item.batch for item, _ in items]
    tensors = {f"{n}.{name}": value for n, batch in enumerate(batches) for name, value in _tensors(batch).items()}
    about = {
        "step": record.step,
        "epoch": record.place.epoch,
        "position": record.place.position,
        "loss": finite(record.loss),
        "gradient": finite(record.gradient),
        "problem": not_finite(record, scaled=False),
        "batches": [_other_fields(batch) for batch in batches],
        "examples": [
            example | {"batch": n} for n, batch in enumerate(batches) for example in _examples(batch, decoders)
        ],
    }
    with saving(folder.path):
        write_tensors(folder.skipped(record.step, "safetensors"), tensors)
        write_json(path, about)
    return path.name


def read_batches(path: Path) -> list[Batch]:
    """Return the batches of a skipped step from its file skipped-STEP.json, as they were in training."""
    about, tensors = read_json(path), read_tensors(path.with_suffix(".safetensors"))
    try:
        batches = []
        for n, others in enumerate(about["batches"]):
            own = {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{n}.")}
            batches.append(Batch(**others | own))
        return batches
    except (KeyError, TypeError):
        raise DataError(f"{path} holds no batches of a skipped step") from None


def _tensors(batch: Batch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _other_fields(batch: Batch) -> dict[str, Any]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def _examples(batch: Batch, decoders: Decoders) -> Iterator[dict[str, Any]]:
    """Yield the examples of a batch: row and segment, and for source and target the token ids and the text."""
    for row in range(len(batch.target)):
        for segment in range(1, batch.segments + 1):
            example: dict[str, Any] = {"row": row, "segment": segment}
            for side in ("source", "target"):
                ids = _ids(batch, side, row, segment)
                if ids:
                    example[f"{side}_ids"] = ids
                    example |= {side: decoders[side](ids)} if side in decoders else {}
            if len(example) > 2:
                yield example


def _ids(batch: Batch, side: str, row: int, segment: int) -> list[int]:
    """Return the token ids of a segment in a row, or an empty list for a side that is missing or holds vectors."""
    values, segments = getattr(batch, side), getattr(batch, f"{side}_seg")
    if values is None or torch.is_floating_point(values):
        return []
    return (values[row] if segments is None else values[row][segments[row] == segment]).tolist()
