"""Training with a time budget, and training of weights that are already trained."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regard.training import budget
from regard.training.checkpoint import RunFolder
from regard.training.schedule import Cosine
from regard.training.tensor_files import read_tensors
from regard.training.trainer import Metrics, Model, Trainer
from tests.unit.training.test_trainer import Recorder, bucketed, copied, same, spec_of, tiny


class Ticking:
    """A clock that advances by `step` seconds with every call."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture(autouse=True)
def double() -> None:
    torch.set_default_dtype(torch.float64)


def constant(model: Model) -> Metrics:
    return {"loss": 1.0}


def timed(path: Path, time: float, recorder: Recorder, **settings: float) -> Trainer:
    spec = spec_of(**{"steps": 10**6, "time": time, "schedule": Cosine(warmup=50), "patience": 0} | settings)  # type: ignore[arg-type]
    return Trainer(tiny(), spec, bucketed(), RunFolder(path), constant, [recorder])


def test_training_ends_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, recorder = Ticking(0.01), Recorder()
    monkeypatch.setattr(budget.time, "monotonic", clock)
    trainer = timed(tmp_path, 20.0, recorder)
    outcome = trainer.fit()
    assert outcome.finished
    assert outcome.why == "time budget used"
    assert 1 < outcome.step == trainer.steps < 10**6
    assert len(recorder.of("valid")) >= 2  # and the last step is one of them
    assert recorder.of("valid")[-1]["step"] == outcome.step
    assert clock.now == pytest.approx(20, rel=0.1)


def test_learning_rate_reaches_its_end_with_the_time(tmp_path: Path) -> None:
    trainer = timed(tmp_path, 3.0, Recorder())
    trainer.fit()
    warmest = trainer.optimizer.rates["adamw"][0]
    assert trainer.optimizer.rate < 0.2 * warmest


def test_steps_bound_a_timed_run(tmp_path: Path) -> None:
    outcome = timed(tmp_path, 60.0, Recorder(), steps=7).fit()
    assert (outcome.step, outcome.why) == (7, "all 7 steps done")


def test_warmup_is_at_most_a_tenth_of_the_steps(tmp_path: Path) -> None:
    trainer = timed(tmp_path, 60.0, Recorder(), steps=100)
    assert trainer.schedule() == Cosine(warmup=10)  # of those that are planned, before anything is measured
    trainer.budget.add(1, 0.1)
    assert trainer.schedule() == Cosine(warmup=10)


def test_a_resumed_run_has_the_rest_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking(0.01)
    monkeypatch.setattr(budget.time, "monotonic", clock)
    first = timed(tmp_path, 40.0, Recorder())
    outcome = first.fit(lambda: "enough" if first.budget.elapsed > 10 else None)
    assert not outcome.finished
    resumed = timed(tmp_path, 40.0, Recorder())
    assert resumed.resume()
    assert 10 <= resumed.budget.elapsed < 12
    assert resumed.progress.steps == first.progress.steps
    began = clock.now
    assert resumed.fit().finished
    assert clock.now - began == pytest.approx(30, rel=0.15)


@pytest.mark.parametrize("better", [False, True])
def test_trained_weights_are_measured_first_and_kept_unless_improved(tmp_path: Path, better: bool) -> None:
    model = tiny()
    before = copied(model)
    losses = iter([1.0, 0.5 if better else 2.0])
    measure: Callable[[Model], Metrics] = lambda _: {"loss": next(losses)}  # noqa: E731
    recorder = Recorder()
    spec = spec_of(4, patience=0)
    trainer = Trainer(model, spec, bucketed(), RunFolder(tmp_path), measure, [recorder], trained=True)
    trainer.fit()
    assert [event["step"] for event in recorder.of("valid")] == [0, 4]
    assert same(read_tensors(trainer.folder.final), before) != better
