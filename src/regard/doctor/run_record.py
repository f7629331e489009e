"""The record of a training run: its log, its recipe, its data and the outputs of its model."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.data.prepare import Prepared, opened
from regard.decoding.beam import Beam
from regard.doctor.finding import Finding
from regard.errors import DataError
from regard.evaluation import baselines
from regard.evaluation.baselines import Baseline
from regard.evaluation.loss import likelihood
from regard.evaluation.validation import classified, translated
from regard.recipe.recipe import Recipe
from regard.runs.assemble import held_out
from regard.runs.trained_model import TrainedModel, load, read_recipe
from regard.training.checkpoint import RunFolder

Event = Mapping[str, Any]
EXAMPLES = 100  # default number of validation examples that are decoded
COUNTED = 2_000_000  # tokens that are counted for the unigram entropy


@dataclass
class Outputs:
    """Sources, outputs and references of validation examples; labels, if the model is a classifier."""

    sources: list[str]
    outputs: list[str]
    references: list[str]


@dataclass
class RunRecord:
    """A training run, read from the files in its folder. The model is loaded only if a check needs its outputs."""

    folder: RunFolder
    recipe: Recipe
    events: list[Event]
    device: str = "auto"
    examples: int = EXAMPLES
    trust_code: bool = False
    unread: list[str] = field(default_factory=list)  # why something could not be examined

    @classmethod
    def read(
        cls, path: str | Path, device: str = "auto", examples: int = EXAMPLES, trust_code: bool = False
    ) -> "RunRecord":
        """Read the log and the recipe of a run."""
        folder = RunFolder(path)
        recipe = read_recipe(folder, trust_code)
        return cls(folder, recipe, read_log(folder.log), device, examples, trust_code)

    def of_kind(self, kind: str) -> list[Event]:
        """Return the events of one kind, such as "step" or "valid"."""
        return [event for event in self.events if event["event"] == kind]

    def curve(self, kind: str, name: str) -> list[tuple[int, float]]:
        """Return (step, value) for all events of a kind in which the field `name` is a finite number."""
        return [(event["step"], float(event[name])) for event in self.of_kind(kind) if is_number(event.get(name))]

    @cached_property
    def train_loss(self) -> list[tuple[int, float]]:
        """The training loss by step: the negative log-likelihood per label, without label smoothing."""
        return self.curve("step", "nll") or self.curve("step", "loss")

    @cached_property
    def valid_loss(self) -> list[tuple[int, float]]:
        """The validation loss by step."""
        return self.curve("valid", "loss")

    @property
    def step(self) -> int:
        """The last step in the log."""
        return max((event["step"] for event in self.events), default=0)

    @property
    def steps(self) -> int:
        """The step at which training ends, or the last step if that is unknown."""
        planned = [event["steps"] for event in self.events if is_number(event.get("steps"))]
        return int(planned[-1]) if planned else self.recipe.train.steps or self.step

    @property
    def end(self) -> Event | None:
        """The last event, if it is the end of training; a comparison with the parent run may follow it."""
        last = next((event for event in reversed(self.events) if event["event"] != "parent"), None)
        return last if last is not None and last["event"] == "end" else None

    @property
    def warmup(self) -> int:
        """The number of steps of learning-rate warm-up."""
        return getattr(self.recipe.train.schedule, "warmup", None) or 0

    @property
    def peak_rate(self) -> float:
        """The peak learning rate of the recipe."""
        return float(getattr(self.recipe.train.optimizer, "learning_rate", None) or 0.0)

    @cached_property
    def data(self) -> Prepared | None:
        """The prepared data, or None if they were removed."""
        try:
            return opened(self.recipe.data, self.folder.data)
        except DataError:
            return None

    @cached_property
    def model(self) -> TrainedModel | None:
        """The trained model, or None if there is no checkpoint."""
        if not self.folder.steps() and not self.folder.final.exists():
            return None
        return load(self.folder.path, self.device, trust_code=self.trust_code)

    @cached_property
    def scores(self) -> Mapping[str, float]:
        """The last validation metrics."""
        valid = self.of_kind("valid")
        return {name: float(value) for name, value in valid[-1].items() if is_number(value)} if valid else {}

    @cached_property
    def baselines(self) -> list[Baseline]:
        """The trivial baselines that training measured."""
        return baselines.stored(self.folder)

    @cached_property
    def unigram_entropy(self) -> float | None:
        """The entropy of the labels in nats: the loss of a model that has learned only how frequent each token is."""
        if self.data is None or not self.data.train:
            return None
        column = "label" if self.data.objective.labelled else "target"
        table = self.data.train[0]
        if column not in table.columns:
            return None
        ids = np.asarray(table[column].ids[:COUNTED])
        if not len(ids) or ids.ndim > 1:
            return None
        counts = np.bincount(ids)
        if column == "target" and not self.data.objective.stream:
            counts[self.data.tokenizers["target"].bos] = 0  # is never a label
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    @cached_property
    def outputs(self) -> Outputs | None:
        """The model's outputs for the first validation examples. None without examples, and for a language model."""
        records, model = self._held_out, self.model
        if records is None or model is None or not self.examples or self.objective_model == "language_model":
            return None
        pairs = [records.objective.pair(record) for record in records.texts[: self.examples]]
        if not pairs:
            return None
        sources, references = (list(texts) for texts in zip(*pairs, strict=True))
        with torch.no_grad():
            if records.objective.labelled:
                return Outputs(sources, classified(model.model, records, sources), references)
            decoded = translated(model.model, records, Beam(beam_size=1), sources)
        return Outputs(sources, [output.text for output in decoded], references)

    @property
    def objective_model(self) -> str:
        """The type of task: sequence_to_sequence, language_model or classifier."""
        return self.recipe.data.objective.model

    @cached_property
    def _held_out(self) -> Any:
        return None if self.data is None else held_out(self.recipe, self.data)

    def source_gain(self) -> tuple[float, float] | None:
        """Return the validation losses with the right sources and with sources of other examples, or None.

        The result is None if there is no model or too little validation text, or if the model does not read a source.
        """
        records, model = self._held_out, self.model
        if records is None or model is None or self.objective_model != "sequence_to_sequence":
            return None
        rows = np.arange(min(len(records.texts), 2 * max(1, self.examples)))
        if len(rows) < 8:
            return None
        table = type(records.table)({name: column.take(rows) for name, column in records.table.columns.items()})
        other = type(table)(table.columns | {"source": table["source"].take(np.roll(rows, len(rows) // 2))})
        losses = [likelihood(model.model, each, records.objective, records.batching).loss for each in (table, other)]
        return losses[0], losses[1]


@dataclass(frozen=True)
class Symptom:
    """A check of a training run: a function that yields what it finds."""

    name: str
    find: Callable[[RunRecord], Iterable[Finding]]


def read_log(path: Path) -> list[Event]:
    """Return the events in log.jsonl. Invalid lines, such as an incomplete last line, are skipped."""
    if not path.exists():
        raise DataError(f"{path} is missing; the doctor reads a run from its log")
    events = list[Event]()
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("step")) is int:
                events.append(event)
    if not events:
        raise DataError(f"{path} has no events; training has not begun, or the file is damaged")
    return events


def is_number(value: Any) -> bool:
    """Return whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
