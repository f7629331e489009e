"""Counts that parts of a model report, such as dropped tokens: their sums are logged and do not affect training."""

import io
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from regard.data.loader import BatchLoader, Place
from regard.data.objectives import Item, Translation
from regard.data.token_store import Table
from regard.models.base import Model
from regard.models.build import build
from regard.presets import preset
from regard.training.checkpoint import RunFolder
from regard.training.console import TrainingConsole
from regard.training.log import Log
from regard.training.optim import AdamW
from regard.training.schedule import Constant
from regard.training.spec import TrainSpec
from regard.training.trainer import Trainer
from regard.variants import apply

SIZES: dict[str, Any] = {"vocab": 20, "d_model": 16, "heads": 2, "encoder.depth": 1, "decoder.depth": 2}


def model(*variants: str) -> Model:
    spec = preset("transformer_small", **SIZES, dropout=0.1)
    for name in variants:
        spec = apply(name, spec)
    return build(spec, seed=1)


class Batches(BatchLoader):
    """Two batches of pairs, in turn without end."""

    one_shape = False  # type: ignore[reportAssignmentType]

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        sides = [[rng.integers(3, 20, rng.integers(1, 9)).tolist() for _ in range(12)] for _ in range(2)]
        table = Table.of(source=[[*s, 2] for s in sides[0]], target=[[1, *t, 2] for t in sides[1]])
        self.items = [
            Translation().item(table.columns, [np.asarray([n]) for n in range(first, first + 6)]) for first in (0, 6)
        ]

    def after(self, place: Place) -> Iterator[tuple[Item, Place]]:
        for position in count(place.position):
            yield self.items[position % 2], Place(0, position + 1)

    def tokens(self, step: int) -> int:
        """Real tokens of a step, source and target: what one expert layer in each stack routes."""
        batch = self.items[(step - 1) % 2].batch
        assert batch.source_seg is not None
        assert batch.target_seg is not None
        return int((batch.source_seg != 0).sum() + (batch.target_seg != 0).sum())


class Recorder:
    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def note(self, event: Any) -> None:
        if event["event"] == "step":
            self.steps.append(dict(event))


def spec_of(steps: int, **settings: Any) -> TrainSpec:
    usual = {"optimizer": AdamW(learning_rate=0.01), "schedule": Constant(), "log_every": 1, "save_every": 3}
    return TrainSpec(steps=steps, **usual | settings)


def trainer_of(path: Path, spec: TrainSpec, trained: Model, *watchers: Any, **settings: Any) -> Trainer:
    path.mkdir(exist_ok=True)
    return Trainer(trained, spec, Batches(), RunFolder(path), watchers=watchers, **settings)


@pytest.mark.parametrize("log_every", [1, 3])
def test_counts_are_logged(tmp_path: Path, log_every: int) -> None:
    """Counts are summed over layers and over the steps since the last line, without validation."""
    log, batches, trained = Log(tmp_path / "log.jsonl"), Batches(), model("switch")

    def measure(model: Model) -> dict[str, float]:
        return {"loss": float(model.loss(batches.items[0].batch).total)}

    trained.train()
    trained.loss(batches.items[0].batch)  # what ran before is not counted
    spec = spec_of(6, log_every=log_every, validate_every=3)
    trainer_of(tmp_path, spec, trained, log, measure=measure).fit()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(log_every, 7, log_every))
    for line in steps:
        expected = sum(batches.tokens(step) for step in range(line["step"] - log_every + 1, line["step"] + 1))
        assert line["routed_tokens"] + line["dropped_tokens"] == expected
        assert line["routed_tokens"] > 0
        assert isinstance(line["dropped_tokens"], int)


def test_accumulated_batches_are_all_counted(tmp_path: Path) -> None:
    recorder, batches = Recorder(), Batches()
    trainer_of(tmp_path, spec_of(2, accumulate=2), model("switch"), recorder).fit()
    assert [step["routed_tokens"] + step["dropped_tokens"] for step in recorder.steps] == [
        batches.tokens(1) + batches.tokens(2)
    ] * 2


def test_nothing_is_logged_without_counts(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer_of(tmp_path, spec_of(1), model(), recorder).fit()
    assert not any("tokens" in name for name in recorder.steps[0] if name != "tokens_per_second")


def test_tokens_beyond_the_capacity_of_experts_are_dropped(tmp_path: Path) -> None:
    recorder, trained = Recorder(), model("switch")
    for name, parameter in trained.named_parameters():
        if name.endswith("router"):
            parameter.data.zero_()  # all tokens want the first expert, which has 4 places in each stack
    trainer_of(tmp_path, spec_of(1), trained, recorder).fit()
    assert recorder.steps[0]["routed_tokens"] == 8
    assert recorder.steps[0]["dropped_tokens"] == Batches().tokens(1) - 8


@pytest.mark.parametrize("variant", ["mixture_of_experts", "switch", "product_key_memory"])
def test_interrupted_training_gives_equal_weights_and_counts(tmp_path: Path, variant: str) -> None:
    """After an interruption, weights and logged counts continue unchanged, because counts are not stored."""
    whole, parts = Recorder(), Recorder()
    trained = trainer_of(tmp_path / "whole", spec_of(7), model(variant), whole)
    trained.fit()
    first = trainer_of(tmp_path / "parts", spec_of(7), model(variant), parts)
    assert not first.fit(stop=lambda: "enough" if first.progress.step == 4 else None).finished
    resumed = trainer_of(tmp_path / "parts", spec_of(7), model(variant), parts)
    assert resumed.resume()
    assert resumed.fit().finished
    weights: dict[str, Tensor] = trained.model.state_dict()
    assert not any("dropped" in name or "routed" in name for name in weights)
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    timeless = [
        [{k: v for k, v in step.items() if k not in ("time", "clock", "tokens_per_second")} for step in recorder.steps]
        for recorder in (whole, parts)
    ]
    assert timeless[0] == timeless[1]


def test_progress_line_shows_the_share_of_dropped_tokens() -> None:
    file = io.StringIO()
    view = TrainingConsole(Console(file=file, force_terminal=True, width=120, color_system=None, legacy_windows=False))
    view.note({"event": "start", "step": 0, "time": 0.0, "steps": 9})
    step = {"event": "step", "step": 1, "time": 1.0, "loss": 2.0, "nll": 1.9, "tokens_per_second": 10.0}
    view.note(step | {"routed_tokens": 300, "dropped_tokens": 100})
    assert view.live is not None
    assert view.live.tasks[0].fields["facts"].endswith("10 tokens/s  25.0% dropped")
    view.note(step | {"routed_tokens": 0, "dropped_tokens": 0})
    assert view.live.tasks[0].fields["facts"].endswith("tokens/s")
    view.close()
