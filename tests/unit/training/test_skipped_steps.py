"""Steps whose loss or gradient is not finite change nothing and are stored; several in a row end training."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.loader import Place
from regard.errors import DataError
from regard.training import skipped_steps
from regard.training.checkpoint import RunFolder
from regard.training.log_window import StepRecord
from regard.training.optim import Adafactor, AdamW, Muon, Optimizer
from regard.training.skipped_steps import not_finite, read_batches, store
from regard.training.trainer import DivergedError, Trainer
from tests.unit.training.test_trainer import (
    Recorder,
    Scripted,
    bucketed,
    copied,
    item_of,
    pairs,
    poison,
    same,
    spec_of,
    stopping,
    tiny,
    trained,
)

MUON = Muon(0.1, rest=AdamW(0.1))
ITEMS = [item_of(pairs(12), [n, n + 4, n + 7]) for n in range(4)]


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_skipped_step_changes_neither_weights_nor_state(tmp_path: Path, what: str) -> None:
    """The step is counted, so the schedule and the order of the batches go on; weights, optimizer and average stay."""
    recorder = Recorder()
    trainer = Trainer(tiny(), spec_of(6, ema=0.6, accumulate=2), Scripted(ITEMS), RunFolder(tmp_path), None, [recorder])
    poison(trainer, {4}, what)
    states: list[tuple[Any, Any, Any]] = []

    def follow() -> None:
        assert trainer.ema is not None
        ema = {name: tensor.clone() for name, tensor in trainer.ema.items()}
        optimizer = {name: tensor.clone() for name, tensor in trainer.optimizer.state().items()}
        states.append((copied(trainer.model), ema, optimizer))

    trainer.fit(follow)
    for before, after, later in zip(states[2], states[3], states[4], strict=True):
        assert same(before, after)
        assert not same(after, later)
    (event,) = recorder.of("skipped")
    assert (event["step"], event["file"]) == (4, "skipped-00000004.json")
    assert event["problem"].startswith("the loss is nan" if what == "loss" else "the gradient is ")
    assert math.isnan(event["loss"]) == (what == "loss")
    assert not math.isfinite(event["gradient"])
    (step,) = recorder.of("step")
    assert step["skipped"] == 1
    assert math.isfinite(step["loss"])
    assert math.isfinite(step["gradient"])


@pytest.mark.parametrize(
    ("bad", "limit", "raised"),
    [({3}, 2, None), ({3, 4}, 2, 4), ({2, 4, 6, 8}, 2, None), ({3, 4, 6, 7, 8}, 3, 8), ({5}, 1, 5)],
)
def test_training_ends_after_several_skipped_steps_in_a_row(
    tmp_path: Path, bad: set[int], limit: int, raised: int | None
) -> None:
    recorder = Recorder()
    spec = spec_of(9, max_skipped=limit)
    trainer = Trainer(tiny(), spec, Scripted(ITEMS), RunFolder(tmp_path), None, [recorder])
    poison(trainer, bad)
    if raised is None:
        assert trainer.fit().finished
    else:
        with pytest.raises(DivergedError, match=f"the loss is nan at step {raised}: training diverged; lower"):
            trainer.fit()
        assert recorder.events[-1]["event"] == "step"
    expected = sorted(step for step in bad if raised is None or step <= raised)
    assert [event["step"] for event in recorder.of("skipped")] == expected
    assert all(tensor.isfinite().all() for tensor in trainer.model.state_dict().values())


def test_skipped_steps_in_a_row_are_counted_across_sessions(tmp_path: Path) -> None:
    """Steps 3 to 5 are bad. Training is stopped after step 4, and ends at step 5 when it is resumed."""
    spec = spec_of(9, max_skipped=3)
    first = Trainer(tiny(), spec, Scripted(ITEMS), RunFolder(tmp_path))
    poison(first, {3, 4, 5})
    first.fit(stopping(first, {4}))
    second = Trainer(tiny(), spec, Scripted(ITEMS), RunFolder(tmp_path))
    poison(second, {3, 4, 5})
    assert second.resume()
    assert second.progress.skipped == 2
    with pytest.raises(DivergedError, match="at step 5"):
        second.fit()


def test_training_with_a_skipped_step_is_deterministic(tmp_path: Path) -> None:
    weights = []
    for name, stops in (("a", set()), ("b", {2, 4})):
        (tmp_path / name).mkdir()
        sessions = [
            Trainer(tiny(0.3), spec_of(7, ema=0.5), bucketed(), RunFolder(tmp_path / name)) for _ in (*stops, 7)
        ]
        for trainer in sessions:
            poison(trainer, {3, 5})
            trainer.resume()
            trainer.fit(stopping(trainer, {stop for stop in stops if stop > trainer.progress.step}))
        weights.append(copied(sessions[-1].model))
    assert same(*weights)


def test_on_a_gpu_steps_are_checked_when_metrics_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a result waits for the device, so it is not read after every step."""
    recorder = Recorder()
    trainer = Trainer(tiny(), spec_of(8, log_every=4), Scripted(ITEMS), RunFolder(tmp_path), None, [recorder])
    poison(trainer, {2, 3, 6})
    monkeypatch.setattr(trainer, "device", torch.device("meta"))
    check = trainer.check_steps
    calls: list[int] = []
    monkeypatch.setattr(trainer, "check_steps", lambda: (calls.append(trainer.progress.step), check()))
    trainer.fit()
    assert calls == [4, 8]
    assert [event["step"] for event in recorder.of("skipped")] == [2, 3, 6]
    assert [event["event"] for event in recorder.events[:4]] == ["start", "skipped", "skipped", "step"]


def test_an_overflow_in_float16_is_no_skipped_step() -> None:
    record = StepRecord(3, Place(), 2.0, math.inf)
    assert not_finite(record, scaled=True) is None
    assert not_finite(record, scaled=False) == "the gradient is inf"
    assert not_finite(record._replace(loss=math.nan), scaled=True) == "the loss is nan"
    assert not_finite(record._replace(gradient=1.0), scaled=False) is None


# -- the stored batches


def test_the_stored_batches_are_those_of_the_step(tmp_path: Path) -> None:
    record = StepRecord(7, Place(0, 2), math.nan, math.inf)
    decoders: dict[str, Callable[[Any], str]] = {"source": lambda ids: f"<{ids}>", "target": str}
    name = store(RunFolder(tmp_path), Scripted(ITEMS), record, 2, decoders)
    assert name == "skipped-00000007.json"
    batches = read_batches(tmp_path / name)
    assert len(batches) == 2
    for batch, item in zip(batches, ITEMS[2:4], strict=True):
        assert batch.alike(item.batch)
        assert torch.equal(batch.target, item.batch.target)
    about = json.loads((tmp_path / name).read_text())
    assert (about["step"], about["epoch"], about["position"], about["loss"]) == (7, 0, 2, None)
    assert about["problem"] == "the loss is nan"
    assert len(about["examples"]) == 6
    example = about["examples"][4]
    source = ITEMS[3].batch.source
    assert source is not None
    assert (example["batch"], example["row"], example["segment"]) == (1, 1, 1)
    assert example["source_ids"] == [i for i in source[1].tolist() if i]
    assert example["source"] == f"<{example['source_ids']}>"


def test_the_batch_of_a_later_epoch_is_stored(tmp_path: Path) -> None:
    loader = bucketed()
    place = Place(2, 1)
    (expected, _), _ = next(zip(loader.after(place), [0], strict=False))
    name = store(RunFolder(tmp_path), bucketed(), StepRecord(9, place, math.nan, 1.0), 1, {})
    assert name is not None
    (batch,) = read_batches(tmp_path / name)
    assert torch.equal(batch.target, expected.batch.target)


def test_only_the_first_steps_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps are stored again if training resumes from a checkpoint before them."""
    monkeypatch.setattr(skipped_steps, "MOST", 2)

    def names(*steps: int) -> list[str | None]:
        folder, loader = RunFolder(tmp_path), Scripted(ITEMS)
        return [store(folder, loader, StepRecord(step, Place(), math.nan, 1.0), 1, {}) for step in steps]

    assert names(3, 5, 8) == ["skipped-00000003.json", "skipped-00000005.json", None]
    assert names(3, 5, 8) == ["skipped-00000003.json", "skipped-00000005.json", None]


def test_a_file_without_batches_is_refused(tmp_path: Path) -> None:
    name = store(RunFolder(tmp_path), Scripted(ITEMS), StepRecord(3, Place(), math.nan, 1.0), 1, {})
    assert name is not None
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match="holds no batches"):
        read_batches(tmp_path / name)


# -- optimizers that skip a step on the device


@pytest.mark.parametrize("spec", [AdamW(0.1), MUON, replace(MUON, weight_decay=0.1)])
def test_an_optimizer_skips_a_step_without_reading_the_flag(spec: Any) -> None:
    torch.set_default_dtype(torch.float32)
    model, reference = tiny().float(), tiny().float()
    skipping, plain = spec.build(model), spec.build(reference)
    gradients = torch.Generator().manual_seed(1)
    for bad in (0.0, 1.0, 0.0, 1.0):
        before, state = copied(model), {name: tensor.clone() for name, tensor in skipping.state().items()}
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            b.grad = torch.randn(b.shape, generator=gradients)
            a.grad = b.grad.clone() if not bad else torch.full_like(a, math.nan)
        skipping.step_if_finite(torch.tensor(bad))
        if bad:
            assert same(copied(model), before)
            assert same(skipping.state(), state)
        else:
            plain.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_other_optimizers_get_no_invalid_gradients() -> None:
    model = tiny()
    optimizer = Optimizer(model, {"sgd": torch.optim.SGD(model.parameters(), lr=0.1)})
    before = copied(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step_if_finite(torch.tensor(1.0))
    assert same(copied(model), before)


@pytest.mark.parametrize("optimizer", [AdamW(0.01), Adafactor(0.01), MUON])
def test_skipping_works_with_every_optimizer(tmp_path: Path, optimizer: Any) -> None:
    trainer = Trainer(tiny(), spec_of(5, optimizer=optimizer), Scripted(ITEMS), RunFolder(tmp_path))
    poison(trainer, {1, 3})
    assert trainer.fit().finished
    assert all(tensor.isfinite().all() for tensor in trainer.model.state_dict().values())


def test_a_run_without_skipped_steps_stores_nothing(tmp_path: Path) -> None:
    trained(tmp_path, spec_of(3), Scripted(ITEMS))
    assert not list(tmp_path.glob("skipped-*"))
