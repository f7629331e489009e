"""The trainer: gradients, checkpoints, early stopping, and interrupted training."""

import json
import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.batch import Batch
from regard.data.batching import Buckets
from regard.data.loader import BatchLoader, Examples, Place
from regard.data.objectives import Classification, Item, Translation
from regard.data.token_store import Table
from regard.errors import DataError, OutOfMemoryError, SpecError
from regard.models.base import Model
from regard.models.build import build
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.models.loss import Loss
from regard.presets import preset
from regard.training import trainer as loop
from regard.training.checkpoint import RunFolder
from regard.training.executor import StepResult
from regard.training.log import Log
from regard.training.optim import AdamW
from regard.training.progress import Progress, newest_best
from regard.training.ranking import ERROR, Criterion, Metrics
from regard.training.schedule import Constant, InverseSqrt
from regard.training.spec import TrainSpec
from regard.training.tensor_files import mean, read_about, read_tensors, weights_digest
from regard.training.trainer import (
    DivergedError,
    LogWindow,
    Trainer,
    precision,
    step_seed,
)
from tests.learning import Learned

Weights = dict[str, Tensor]
SIZES: dict[str, Any] = {"vocab": 20, "d_model": 16, "heads": 2}


def transformer(dropout: float = 0.0, seed: int = 1) -> Model:
    depth: dict[str, Any] = {"encoder.depth": 1, "decoder.depth": 1}
    return build(preset("transformer_small", **SIZES, dropout=dropout, **depth), seed=seed)


class Toy(Model):
    """A fast toy model, which predicts the next token from the current token and the source, with label smoothing."""

    def __init__(self, dropout: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(20, 8, generator=generator))
        self.matrix = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.shift = nn.Parameter(torch.zeros(8))
        self.dropout = dropout

    def loss(self, batch: Batch) -> Loss:
        assert batch.source is not None
        assert batch.source_seg is not None
        assert batch.labels is not None
        assert batch.target_seg is not None
        source = (self.table[batch.source] * (batch.source_seg > 0)[..., None]).sum(1, keepdim=True)
        x = nn.functional.dropout(self.table[batch.target] + source, self.dropout, self.training)
        log_p = ((x @ self.matrix + self.shift) @ self.table.T).log_softmax(-1)
        real = batch.target_seg > 0
        nll = -log_p.gather(-1, batch.labels[..., None])[..., 0][real].sum()
        total = 0.9 * nll - 0.1 * log_p.mean(-1)[real].sum()
        return Loss(total, real.sum().to(total.dtype), total.new_zeros(()), nll)


def tiny(dropout: float = 0.0, seed: int = 1) -> Model:
    return Toy(dropout, seed)


def pairs(number: int, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    sides = [[rng.integers(3, 20, rng.integers(1, 7)).tolist() for _ in range(number)] for _ in range(2)]
    return Table.of(source=[[*s, 2] for s in sides[0]], target=[[1, *t, 2] for t in sides[1]])


def item_of(table: Table, examples: Sequence[int]) -> Item:
    return Translation().item(table.columns, [np.asarray([example]) for example in examples])


class Scripted(BatchLoader):
    """The given batches, repeated without end."""

    one_shape = False  # type: ignore[reportAssignmentType]

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items

    def after(self, place: Place) -> Iterator[tuple[Item, Place]]:
        for position in count(place.position):
            yield self.items[position % len(self.items)], Place(0, position + 1)


def bucketed(tokens: int = 24) -> BatchLoader:
    return BatchLoader(Examples([pairs(30)], [1.0], Translation()), Buckets(tokens), seed=5)


def one_batch() -> BatchLoader:
    return Scripted([item_of(pairs(4), range(4))])


class Recorder:
    """A watcher that stores the events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def note(self, event: Any) -> None:
        self.events.append(dict(event))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


def spec_of(steps: int, **settings: Any) -> TrainSpec:
    usual = {
        "optimizer": AdamW(learning_rate=0.01),
        "schedule": InverseSqrt(4),
        "log_every": 1000,
        "validate_every": steps,
    }
    return TrainSpec(steps=steps, **usual | settings)


def trained(path: Path, spec: TrainSpec, stream: BatchLoader, model: Model | None = None, **settings: Any) -> Trainer:
    path.mkdir(exist_ok=True)
    trainer = Trainer(model or tiny(), spec, stream, RunFolder(path), **settings)
    assert trainer.fit().finished
    return trainer


def copied(model: Model) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def farthest(a: Model, b: Model) -> float:
    others = dict(b.named_parameters())
    return max(float((p - others[name]).detach().abs().max()) for name, p in a.named_parameters())


# -- the gradient


def split_and_whole(steps: int) -> tuple[list[Item], list[Item]]:
    """The same examples as four batches of unequal size per step, and as one batch."""
    table = pairs(12 * steps, seed=3)
    small, large = [], []
    for first in range(0, 12 * steps, 12):
        cuts = [first, first + 1, first + 3, first + 7, first + 12]
        small += [item_of(table, range(a, b)) for a, b in pairwise(cuts)]
        large.append(item_of(table, range(first, first + 12)))
    return small, large


@pytest.mark.parametrize("make", [transformer, tiny])
def test_accumulating_four_batches_equals_one_large_batch(
    tmp_path: Path, make: Callable[[], Model], learned: Learned
) -> None:
    small, large = split_and_whole(20)
    spec, recorders = spec_of(20, clip=0.1, log_every=1), (Recorder(), Recorder())
    accumulated = replace(spec, accumulate=4)
    four = trained(tmp_path / "4", accumulated, Scripted(small), make(), watchers=[recorders[0]])
    one = trained(tmp_path / "1", spec, Scripted(large), make(), watchers=[recorders[1]])
    learned("largest difference of weights", farthest(four.model, one.model), below=1e-9, broken=1e-3)
    assert farthest(one.model, make()) > 0.01
    for name in ("loss", "nll", "gradient"):
        actual, expected = ([event[name] for event in n.of("step")] for n in recorders)
        assert actual == pytest.approx(expected, rel=1e-9)
    assert min(event["gradient"] for event in recorders[0].of("step")) > 0.1  # so that clipping is part of it
    assert four.progress.labels == one.progress.labels == sum(item.labels for item in large)
    assert four.progress.place == Place(0, 80)


def test_accumulating_four_batches_equals_one_large_batch_in_float32(tmp_path: Path, learned: Learned) -> None:
    torch.set_default_dtype(torch.float32)
    small, large = split_and_whole(8)
    spec, recorders = spec_of(8, log_every=1), (Recorder(), Recorder())
    accumulated = replace(spec, accumulate=4)
    trained(tmp_path / "4", accumulated, Scripted(small), transformer(), watchers=[recorders[0]])
    trained(tmp_path / "1", spec, Scripted(large), transformer(), watchers=[recorders[1]])
    actual, expected = ([event["loss"] for event in n.of("step")] for n in recorders)
    assert len(actual) == 8
    difference = max(abs(a - b) for a, b in zip(actual, expected, strict=True))
    learned("largest difference of losses", difference, below=1e-5, broken=1e-2)


def test_a_step_follows_the_mean_over_all_its_labels(tmp_path: Path) -> None:
    small, _ = split_and_whole(1)
    sizes = [item.labels for item in small]
    assert len(set(sizes)) > 1
    model = transformer()
    expected: Weights = {}
    for item in small:
        loss = model.loss(item.batch)
        gradients = torch.autograd.grad(loss.total, list(model.parameters()))
        for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
            expected[name] = expected.get(name, torch.zeros_like(gradient)) + gradient / sum(sizes)
    trainer = Trainer(model, spec_of(1, accumulate=4, clip=0.0), Scripted(small), RunFolder(tmp_path))
    actual: Weights = {}
    change = trainer.optimizer.step
    trainer.optimizer.step = lambda: actual.update(gradients_of(model)) or change()
    trainer.fit()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-14)


def gradients_of(model: Model) -> Weights:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_auxiliary_losses_are_averaged_over_a_step(tmp_path: Path) -> None:
    """The auxiliary losses of the batches are averaged with weights by labels, so accumulation does not change them."""
    small, _ = split_and_whole(1)
    results = []
    for accumulate, items in ((4, small), (1, small[:1])):
        model = tiny()
        parameter = next(model.parameters())
        spec = spec_of(1, accumulate=accumulate, clip=0.0)
        trainer = Trainer(model, spec, Scripted(items), RunFolder(tmp_path))

        def loss(batch: Any, parameter: Tensor = parameter) -> Loss:
            nothing = parameter.sum() * 0
            return Loss(nothing, nothing, parameter.sum(), nothing)

        trainer.update = replace(trainer.update, loss=loss)
        gradients: Weights = {}
        change = trainer.optimizer.step

        def recording_step(model: Model = model, change: Any = change, gradients: Weights = gradients) -> None:
            gradients.update(gradients_of(model))
            change()

        trainer.optimizer.step = recording_step
        trainer.fit()
        results.append(next(iter(gradients.values())))
    assert torch.allclose(results[0], torch.ones_like(results[0]))
    assert torch.allclose(results[1], torch.ones_like(results[1]))


def test_the_schedule_is_followed(tmp_path: Path) -> None:
    recorder = Recorder()
    trained(tmp_path, spec_of(8, log_every=1), one_batch(), watchers=[recorder])
    expected = [0.01 * min(step / 4, math.sqrt(4 / step)) for step in range(1, 9)]
    assert [event["learning_rate"] for event in recorder.of("step")] == pytest.approx(expected)


def test_dropout_is_drawn_anew_at_every_step_and_for_every_seed(tmp_path: Path) -> None:
    assert len({step_seed(seed, step) for seed in (-1, 0, 1, 2, 2**63 - 1) for step in range(1, 50)}) == 5 * 49
    assert all(0 <= step_seed(seed, 3) < 2**63 for seed in (-(2**63), -1, 0, 2**63 - 1))
    runs = [
        trained(tmp_path / str(n), spec_of(2, seed=seed), one_batch(), tiny(0.3)) for n, seed in enumerate((1, 1, 2))
    ]
    weights = [copied(run.model) for run in runs]
    assert same(weights[0], weights[1])
    assert not same(weights[0], weights[2])


# -- the moving average


def test_moving_average_matches_its_formula(tmp_path: Path) -> None:
    model = tiny()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    measured_weights: list[Weights] = []

    def measure(measured: Model) -> Metrics:
        measured_weights.append(copied(measured))
        return {"loss": 1.0}

    spec = spec_of(30, ema=0.6, validate_every=1, keep=30, patience=0)
    trainer = Trainer(model, spec, bucketed(), RunFolder(tmp_path), measure)
    averages: list[Weights] = []
    raws: list[Weights] = []

    def follow() -> None:
        step = trainer.progress.step
        decay = min(0.6, (1 + step) / (10 + step))  # 0.6 from step 13 on
        for name, p in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * p.detach()
        averages.append({name: tensor.clone() for name, tensor in expected.items()})
        raws.append(copied(model))

    trainer.fit(follow)
    assert len(averages) == 30
    for step, (average, raw, measured) in enumerate(zip(averages, raws, measured_weights, strict=True), start=1):
        saved = read_tensors(trainer.folder.weights(step))
        for name, tensor in average.items():
            torch.testing.assert_close(measured[name], tensor, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(saved[name], tensor, rtol=1e-12, atol=1e-14)
        assert not same(measured, raw)
    without = trained(tmp_path / "without", spec_of(30), bucketed())
    assert same(copied(without.model), raws[-1])  # averaging does not change what is averaged


# -- validation, early stopping, choice of the final weights


class Judge:
    """A validation that returns the given scores and stores the weights."""

    def __init__(self, criterion: str, scores: Sequence[float]) -> None:
        self.criterion, self.scores = criterion, [float(score) for score in scores]
        self.weights: list[Weights] = []
        self.modes: list[bool] = []

    def __call__(self, model: Model) -> Metrics:
        assert not torch.is_grad_enabled()
        self.modes.append(model.training)
        self.weights.append(copied(model))
        torch.rand(7)  # whatever validation draws
        return {self.criterion: self.scores[len(self.weights) - 1], "other": 0.0}


def ranking(name: str) -> Criterion:
    return Criterion(name, higher_is_better=name != "loss")


def judged(path: Path, scores: Sequence[float], criterion: str = "loss", **settings: Any) -> tuple[Trainer, Judge]:
    judge = Judge(criterion, scores)
    spec = spec_of(**{"steps": len(scores), "validate_every": 1, "patience": 0} | settings)
    return trained(path, spec, bucketed(), measure=judge, criterion=ranking(criterion)), judge


@pytest.mark.parametrize(
    ("scores", "criterion", "patience", "ends"),
    [
        ([5, 4, 4.5, 4.2, 3, 2, 1], "loss", 2, 4),
        ([5, 4, 4.5, 3.9, 4, 3.95, 1], "loss", 2, 6),
        ([5, 5, 5, 1], "loss", 2, 3),  # as good is no better
        ([1, 2, 1, 1.5, 9], "bleu", 2, 4),
        ([1, 2, 1, 3, 1, 1, 9], "accuracy", 2, 6),
        ([5, 6, 7, 8, 9], "loss", 0, 5),
        ([5, 6, 7], "loss", 5, 3),
        ([math.nan, 6, math.nan, 7, 1], "loss", 2, 4),
        ([6, math.nan, 7, 1], "bleu", 3, 4),
    ],
)
def test_early_stopping_after_patience_validations(
    tmp_path: Path, scores: list[float], criterion: str, patience: int, ends: int
) -> None:
    recorder = Recorder()
    judge = Judge(criterion, scores)
    spec = spec_of(len(scores), validate_every=1, patience=patience)
    trainer = Trainer(tiny(), spec, bucketed(), RunFolder(tmp_path), judge, [recorder], ranking(criterion))
    outcome = trainer.fit()
    assert (outcome.finished, outcome.step, len(judge.weights)) == (True, ends, ends)
    early = patience and ends < len(scores)
    assert outcome.why == (f"no improvement in {patience} validations" if early else f"all {len(scores)} steps done")
    assert trainer.folder.final.exists()
    assert set(judge.modes) == {False}


SCORES = [5.0, 3.0, 4.0, 2.0, 6.0, 3.0, 4.5]  # in order: steps 4, 2, 6 (as good as 2, but later), 3, 7, 1, 5


@pytest.mark.parametrize(
    ("settings", "criterion", "steps"),
    [
        ({}, "loss", [4]),
        ({"average": 3}, "loss", [4, 2, 6]),
        ({"average": 3, "keep": 1}, "loss", [4, 2, 6]),
        ({"average": 3}, "bleu", [5, 1, 7]),
        ({"choose": "last"}, "loss", [7]),
        ({"choose": "last", "average": 3}, "loss", [5, 6, 7]),
        ({"choose": "last", "average": 5}, "bleu", [3, 4, 5, 6, 7]),
        ({"average": 20, "keep": 1}, "loss", [4, 2, 6, 3, 7, 1, 5]),
        ({"average": 3, "ema": 0.5}, "loss", [4, 2, 6]),
    ],
)
def test_the_final_weights_are_those_chosen(
    tmp_path: Path, settings: dict[str, Any], criterion: str, steps: list[int]
) -> None:
    of_mean = 1.25 if criterion == "loss" else 7.0  # better than each
    trainer, judge = judged(tmp_path, [*SCORES, of_mean], criterion, **settings | {"steps": 7})
    final = read_tensors(trainer.folder.final)
    expected = mean([judge.weights[step - 1] for step in steps])
    assert same(final, expected)
    about = read_about(trainer.folder.final)
    assert json.loads(about["steps"]) == steps
    assert about["sha256"] == weights_digest(expected)
    scores = json.loads(about["scores"])
    if len(steps) == 1:
        assert len(judge.weights) == 7
        assert scores[criterion] == SCORES[steps[0] - 1]
    else:  # the mean is measured
        assert len(judge.weights) == 8
        assert same(judge.weights[7], expected)
        assert scores[criterion] == of_mean
    kept = {*range(8 - trainer.spec.keep, 8), *trainer.progress.best} - {0, -1, -2, -3}
    assert trainer.folder.steps() == sorted(step for step in kept if step > 0)


class MetricSequence:
    """A validation that returns the given metrics: (BLEU, loss) of each validation."""

    def __init__(self, *metrics: tuple[float, float], error: float = 0.0) -> None:
        self.metrics, self.error = iter(metrics), error

    def __call__(self, model: Model) -> Metrics:
        bleu, loss = next(self.metrics)
        return {"bleu": float(bleu), "loss": float(loss), ERROR: self.error}


def final_choice(path: Path, judge: MetricSequence, steps: int, **settings: Any) -> tuple[list[int], Metrics, int]:
    """Train, and return (steps, scores) of the final weights and the last step of training."""
    path.mkdir(exist_ok=True)
    spec = spec_of(**{"steps": steps, "validate_every": 1} | settings)
    trainer = Trainer(tiny(), spec, bucketed(), RunFolder(path), judge, (), ranking("bleu"))
    outcome = trainer.fit()
    about = read_about(trainer.folder.final)
    return json.loads(about["steps"]), json.loads(about["scores"]), outcome.step


def test_a_tie_with_a_falling_loss_is_progress(tmp_path: Path) -> None:
    """One-word targets have no 4-gram, so BLEU stays 0 as the loss falls. The first weights must not be chosen."""
    judge = MetricSequence(*((0.0, 5.0 - 0.1 * step) for step in range(12)))
    assert final_choice(tmp_path, judge, 12, patience=2, average=1)[::2] == ([12], 12)


def test_training_stops_when_neither_score_nor_loss_improves(tmp_path: Path) -> None:
    judge = MetricSequence((1, 5), (2, 4), (2, 3), (3, 3.5), (3, 3.5), (2, 3.2), (9, 1))
    assert final_choice(tmp_path, judge, 7, patience=2)[2] == 6


def test_noise_of_the_score_is_no_reason_to_keep_early_weights(tmp_path: Path) -> None:
    metrics = [(4.0, 6.0), (9.0, 5.0), (6.9, 2.0), (8.5, 3.0)]
    assert final_choice(tmp_path / "a", MetricSequence(*metrics), 4, patience=0)[0] == [2]
    assert final_choice(tmp_path / "b", MetricSequence(*metrics, error=4.0), 4, patience=0)[0] == [4]


@pytest.mark.parametrize("choose", ["best", "last"])
@pytest.mark.parametrize(
    ("of_mean", "error", "kept"),
    [
        ((86.7, 0.9), 0.0, [3]),  # observed on one-word targets, where a checkpoint had 97.4
        ((97.5, 0.9), 0.0, "mean"),
        ((97.4, 0.5), 0.0, "mean"),  # as good, with as low a loss
        ((97.4, 0.6), 0.0, [3]),
        ((97.0, 0.4), 1.0, "mean"),  # no worse than chance, and a lower loss
        ((96.0, 0.4), 1.0, [3]),
    ],
)
def test_a_mean_of_checkpoints_is_kept_only_if_it_is_as_good_as_the_best_of_them(
    tmp_path: Path, choose: str, of_mean: tuple[float, float], error: float, kept: Any
) -> None:
    judge = MetricSequence((20.0, 3.0), (60.0, 1.0), (97.4, 0.5), of_mean, error=error)
    steps, scores, _ = final_choice(tmp_path, judge, 3, patience=0, average=3, choose=choose)
    if kept == "mean":
        assert sorted(steps) == [1, 2, 3]
        assert (scores["bleu"], scores["loss"]) == of_mean
    else:
        assert steps == kept
        assert scores["bleu"] == 97.4
        assert same(read_tensors(RunFolder(tmp_path).final), read_tensors(RunFolder(tmp_path).weights(3)))


@pytest.mark.parametrize(
    ("choose", "latest", "best", "validated", "used"),
    [
        ("best", 477, [450, 425], [425, 450], 477),  # still improving: the newest weights
        ("best", 477, [425, 450], [425, 450], 425),
        ("best", 450, [450], [450], 450),
        ("best", 30, [], [], 30),
        ("last", 477, [425], [425, 450], 477),
    ],
)
def test_unfinished_training_uses_a_single_checkpoint(
    choose: Any, latest: int, best: list[int], validated: list[int], used: int
) -> None:
    assert newest_best(TrainSpec(choose=choose, average=5), latest, best, validated) == used


def test_a_checkpoint_without_the_best_values_so_far_is_resumed(tmp_path: Path) -> None:
    metrics = [(5.0, 3.0), (9.0, 2.0), (1.0, 2.5)]
    spec = spec_of(4, validate_every=1, patience=0)
    trainer = Trainer(tiny(), spec, bucketed(), RunFolder(tmp_path), MetricSequence(*metrics), (), ranking("bleu"))
    trainer.fit(lambda: "enough" if trainer.progress.step == 3 else None)
    path = trainer.folder.trainer(3, "json")
    state = json.loads(path.read_text())
    del state["reached"], state["checksum"]
    path.write_text(json.dumps(state))
    resumed = Trainer(tiny(), spec, bucketed(), RunFolder(tmp_path), MetricSequence((2.0, 2.2)), (), ranking("bleu"))
    assert resumed.resume()
    assert (resumed.progress.reached["bleu"], resumed.progress.reached["loss"]) == (9.0, 2.0)


def test_memory_that_runs_out_in_a_validation_is_not_blamed_on_the_batch(tmp_path: Path) -> None:
    def measure(model: Model) -> Metrics:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    spec = spec_of(4, validate_every=2, patience=0)
    with pytest.raises(OutOfMemoryError, match=r"ran out on cpu while validating; .* train.decode=16"):
        Trainer(tiny(), spec, bucketed(), RunFolder(tmp_path), measure).fit()


def test_a_classifier_that_lacks_memory_in_a_validation_translates_no_fewer_records(tmp_path: Path) -> None:
    loader = bucketed()

    def measure(model: Model) -> Metrics:
        loader.examples.objective = Classification(("a", "b"))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    with pytest.raises(OutOfMemoryError, match=r"while validating; lower data.batching.tokens, or truncate long texts"):
        Trainer(tiny(), spec_of(4, validate_every=2, patience=0), loader, RunFolder(tmp_path), measure).fit()


def test_without_validation_the_last_weights_are_final(tmp_path: Path) -> None:
    weights: list[Weights] = []
    trainer = Trainer(tiny(), spec_of(7, save_every=2, average=2), bucketed(), RunFolder(tmp_path))

    def follow() -> None:
        weights.append(copied(trainer.model))

    trainer.fit(follow)
    assert json.loads(read_about(trainer.folder.final)["steps"]) == [6, 7]
    assert same(read_tensors(trainer.folder.final), mean([weights[5], weights[6]]))


def test_validation_does_not_change_training(tmp_path: Path) -> None:
    judge = Judge("loss", [1.0] * 12)
    spec = spec_of(12, validate_every=1, patience=0)
    validated = trained(tmp_path / "a", spec, bucketed(), tiny(0.3), measure=judge)
    unvalidated = trained(tmp_path / "b", spec_of(12), bucketed(), tiny(0.3))
    assert same(copied(validated.model), copied(unvalidated.model))


# -- interrupted and resumed training

RESUMING: dict[str, dict[str, Any]] = {
    "plain": {},
    "average of the best": {"average": 3, "keep": 2},
    "average of the last": {"average": 3, "keep": 4, "choose": "last", "ema": 0.7},
    "moving average": {"ema": 0.7, "average": 2},
}
STEPS = 13


def held_out_loss(model: Model) -> Metrics:
    loss = model.loss(item_of(pairs(6, seed=9), range(6)).batch)
    torch.rand(3)
    return {"loss": float(loss.nll / loss.tokens)}


def in_sessions(
    path: Path, settings: dict[str, Any], stops: set[int], make: Callable[[float, int], Model] = tiny
) -> Trainer:
    """Train to the end, interrupted after each of the steps `stops`; every session starts with other random weights."""
    path.mkdir()
    spec = spec_of(STEPS, accumulate=2, validate_every=4, save_every=3, **settings)
    for session in count():
        model = make(0.3, 1 if session == 0 else 50 + session)
        trainer = Trainer(model, spec, bucketed(), RunFolder(path), held_out_loss)
        assert trainer.resume() == (session > 0)
        left = {stop for stop in stops if stop > trainer.progress.step}
        outcome = trainer.fit(stopping(trainer, left))
        assert outcome.finished == (not left)
        if outcome.finished:
            assert session == len(stops)
            return trainer
        assert (outcome.step, outcome.why) == (min(left), "asked to")
    raise AssertionError


def stopping(trainer: Trainer, stops: set[int]) -> Callable[[], str | None]:
    return lambda: "asked to" if trainer.progress.step in stops else None


@pytest.fixture(scope="module")
def straight_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trainer]:
    """Uninterrupted training runs, one for each of `RESUMING`."""
    folder, runs = tmp_path_factory.mktemp("straight"), dict[str, Trainer]()

    def run(name: str) -> Trainer:
        if name not in runs:
            runs[name] = in_sessions(folder / name, RESUMING[name], set())
        return runs[name]

    return run


EVERY = set(range(1, STEPS))


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        *(("plain", EVERY), ("plain", {3, 4, 8, 9}), ("plain", {12})),
        *(("average of the best", EVERY), ("average of the best", {5})),
        *(("average of the last", EVERY), ("average of the last", {1, 7, 10})),
        *(("moving average", EVERY), ("moving average", {5}), ("moving average", {4, 6})),
    ],
)
def test_interruptions_do_not_change_the_result(
    tmp_path: Path, straight_runs: Callable[[str], Trainer], name: str, stops: set[int]
) -> None:
    straight = straight_runs(name)
    resumed = in_sessions(tmp_path / "resumed", RESUMING[name], stops)
    expected_folder, actual_folder = straight.folder, resumed.folder
    assert same(read_tensors(actual_folder.final), read_tensors(expected_folder.final))
    assert read_about(actual_folder.final) == read_about(expected_folder.final)
    assert actual_folder.steps() == expected_folder.steps()
    assert all(
        same(read_tensors(actual_folder.weights(step)), read_tensors(expected_folder.weights(step)))
        for step in expected_folder.steps()
    )
    regular = [3, 4, 6, 8, 9, 12, 13]
    assert resumed.progress.saved == straight.progress.saved == regular[-straight.spec.keep :]
    actual, expected = (asdict(t.progress) | {"seconds": 0, "clock": 0, "validation": 0} for t in (resumed, straight))
    assert actual == expected
    assert straight.progress.place.epoch > 0  # the data began anew on the way
    latest = expected_folder.latest(), actual_folder.latest()
    assert latest[0] is not None
    assert latest[1] is not None
    for a, b in zip(expected_folder.load(latest[0]), actual_folder.load(latest[1]), strict=True):
        assert same(a, b)


def test_interrupted_transformer_training_gives_equal_weights(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    settings = RESUMING["moving average"]
    straight = in_sessions(tmp_path / "straight", settings, set(), transformer)
    resumed = in_sessions(tmp_path / "resumed", settings, {1, 7, 10}, transformer)
    assert same(copied(resumed.model), copied(straight.model))
    assert same(read_tensors(resumed.folder.final), read_tensors(straight.folder.final))


def test_a_stop_leaves_a_checkpoint_that_is_never_averaged(tmp_path: Path) -> None:
    spec = spec_of(STEPS, save_every=3, average=3, choose="last")
    folder = RunFolder(tmp_path)
    trainer = Trainer(tiny(), spec, bucketed(), folder)
    trainer.fit(stopping(trainer, {5}))
    assert trainer.progress.saved == [3]
    assert folder.steps() == [3, 5]
    latest = folder.latest()
    assert latest is not None
    assert (latest.step, Progress.of(latest.state).saved) == (5, [3])
    resumed = Trainer(tiny(), spec, bucketed(), folder)
    resumed.resume()
    resumed.fit(stopping(resumed, {6}))  # where a checkpoint is due anyway
    assert (resumed.progress.saved, folder.steps()) == ([3, 6], [3, 5, 6])


def test_a_stop_right_after_a_checkpoint_does_not_write_it_again(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = Trainer(tiny(), spec_of(STEPS, save_every=3), bucketed(), RunFolder(tmp_path), watchers=[recorder])
    trainer.fit(stopping(trainer, {6}))
    assert [event["step"] for event in recorder.of("save")] == [3, 6]
    assert RunFolder(tmp_path).checkpoints() == [3, 6]


def test_killed_training_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    class KilledError(BaseException):
        """Simulates a killed process."""

    def kill(trainer: Trainer) -> Callable[[], str | None]:
        def stop() -> str | None:
            if trainer.progress.step == 8:
                raise KilledError
            return None

        return stop

    spec = spec_of(STEPS, save_every=3)
    straight = trained(tmp_path / "straight", spec, bucketed(), tiny(0.3))
    folder = RunFolder(tmp_path / "killed")
    folder.path.mkdir()
    trainer = Trainer(tiny(0.3), spec, bucketed(), folder)
    with pytest.raises(KilledError):
        trainer.fit(kill(trainer))
    resumed = Trainer(tiny(0.3, seed=7), spec, bucketed(), folder)
    assert resumed.resume()
    assert resumed.progress.step == 6
    resumed.fit()
    assert same(copied(resumed.model), copied(straight.model))
    assert same(read_tensors(folder.final), read_tensors(straight.folder.final))


def test_early_stopping_counts_across_sessions(tmp_path: Path) -> None:
    scores = [3.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    spec = spec_of(6, validate_every=1, patience=3)
    folder = RunFolder(tmp_path)
    validations = 0
    for stop in (1, 3, 4, None):
        judge = Judge("loss", scores[validations:])
        trainer = Trainer(tiny(), spec, bucketed(), folder, judge)
        trainer.resume()
        outcome = trainer.fit(stopping(trainer, set() if stop is None else {stop}))
        validations += len(judge.weights)
    assert (outcome.finished, outcome.step) == (True, 5)
    assert json.loads(read_about(folder.final)["steps"]) == [2]


def test_a_run_killed_before_its_final_weights_gets_them(tmp_path: Path) -> None:
    trainer, _ = judged(tmp_path, [3.0, 2.0, 4.0])
    final = read_tensors(trainer.folder.final)
    trainer.folder.final.unlink()
    resumed = Trainer(tiny(seed=9), trainer.spec, bucketed(), trainer.folder, Judge("loss", []))
    assert resumed.resume()
    outcome = resumed.fit()
    assert (outcome.finished, outcome.step) == (True, 3)
    assert same(read_tensors(trainer.folder.final), final)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    spec = spec_of(2)
    trained(tmp_path, spec, bucketed(), tiny())
    model = tiny()
    model.register_parameter("another", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(DataError, match=r"the weights of step 2 do not fit the model of recipe.json .*another"):
        Trainer(model, spec, bucketed(), RunFolder(tmp_path)).resume()


def test_resume_without_a_checkpoint_returns_false(tmp_path: Path) -> None:
    assert Trainer(tiny(), spec_of(3), bucketed(), RunFolder(tmp_path)).resume() is False


def test_progress_round_trips_through_json() -> None:
    progress = Progress(
        *(7, Place(2, 3), 99, 1.5, [3, 6], {3: {"loss": 2.0}, 6: {"loss": 1.0}}, [6, 3], {"loss": 1.0}),
        *(1, {"scale": 2.0}),
    )
    assert Progress.of(json.loads(json.dumps(progress.record()))) == progress


# -- divergence


def poison(trainer: Trainer, steps: Container[int], what: str = "loss") -> None:
    """Make the loss of some steps NaN, or their gradient infinite."""
    original_loss = trainer.update.loss

    def loss(batch: Any) -> Loss:
        result = original_loss(batch)
        if trainer.progress.step not in steps:
            return result
        if what == "loss":
            return result._replace(total=result.total * math.nan)
        zero = next(trainer.model.parameters()).sum() * 0
        return result._replace(total=result.total + zero.sqrt())  # the slope of a root is infinite at 0

    trainer.update = replace(trainer.update, loss=loss)


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize(
    ("log_every", "validate_every", "save_every", "stop"),
    [(1, 100, 3, None), (100, 5, 3, None), (100, 100, 3, 5), (100, 100, 3, None)],
)
def test_nan_loss_or_gradient_ends_training(
    tmp_path: Path, what: str, log_every: int, validate_every: int, save_every: int, stop: int | None
) -> None:
    """Step 5 is the first bad step. It is detected before the next validation or checkpoint."""
    recorder = Recorder()
    spec = spec_of(
        20, log_every=log_every, validate_every=validate_every, save_every=save_every, max_skipped=1, accumulate=2
    )
    trainer = Trainer(tiny(), spec, bucketed(), RunFolder(tmp_path), held_out_loss, [recorder])
    poison(trainer, range(5, 100), what)
    with pytest.raises(DivergedError, match=r"lower train\.optimizer\.learning_rate") as error:
        trainer.fit(stopping(trainer, set() if stop is None else {stop}))
    assert "at step 5: training diverged" in str(error.value)
    latest = trainer.folder.latest()
    assert latest is not None
    assert latest.step == 3
    assert all(tensor.isfinite().all() for tensors in trainer.folder.load(latest) for tensor in tensors.values())
    assert trainer.folder.steps() == [3]
    assert not trainer.folder.final.exists()
    assert recorder.events[-1]["event"] == "step"
    resumed = Trainer(tiny(seed=4), spec, bucketed(), trainer.folder, held_out_loss)
    assert resumed.resume()
    resumed.fit()


def test_steps_that_overflowed_in_float16_are_counted_and_not_averaged() -> None:
    window = LogWindow()
    for norm in (1.0, math.inf, 3.0):
        window.results.append(StepResult(torch.tensor(4.0), torch.tensor(4.0), torch.tensor(norm)))
    window.labels, window.places = [1, 1, 1], 3
    metrics = window.metrics(scaled=True)
    assert (metrics["loss"], metrics["gradient"], metrics["skipped"]) == (4.0, 2.0, 1)
    window.results, window.labels = [StepResult(torch.tensor(4.0), torch.tensor(4.0), torch.tensor(math.inf))], [1]
    assert "gradient" not in window.metrics(scaled=True)


def test_a_gradient_that_overflows_at_every_scale_ends_the_run(tmp_path: Path) -> None:
    trainer = Trainer(tiny(), spec_of(20, log_every=5), bucketed(), RunFolder(tmp_path))
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1e-5)
    with pytest.raises(DivergedError, match="overflows float16 at every loss scale at step 5"):
        trainer.fit()


# -- events


def test_watchers_receive_events_in_order(tmp_path: Path) -> None:
    recorders = Recorder(), Recorder()
    judge = Judge("loss", [3.0, 2.0, 2.5])
    spec = spec_of(5, validate_every=2, save_every=3, log_every=2, average=2)
    trainer = Trainer(tiny(), spec, bucketed(), RunFolder(tmp_path), judge, recorders)
    judge.scores.append(1.0)  # of the mean
    trainer.fit()
    events = [(event["event"], event["step"]) for event in recorders[0].events]
    assert events == [
        ("start", 0),
        *(("step", 2), ("valid", 2), ("save", 2)),
        *(("step", 3), ("save", 3)),
        *(("step", 4), ("valid", 4), ("save", 4)),
        *(("step", 5), ("valid", 5), ("save", 5)),
        *(("final", 5), ("end", 5)),
    ]
    assert recorders[1].events == recorders[0].events
    start, final, end = recorders[0].events[0], recorders[0].events[-2], recorders[0].events[-1]
    assert (start["steps"], start["device"], start["precision"]) == (5, "cpu", "torch.float32")
    assert [event["best"] for event in recorders[0].of("valid")] == [2, 4, 4]
    assert [event["loss"] for event in recorders[0].of("valid")] == [3.0, 2.0, 2.5]
    assert (final["steps"], final["loss"]) == ([4, 5], 1.0)
    assert (end["finished"], end["why"]) == (True, "all 5 steps done")


def test_step_event_has_means_since_the_previous_one(tmp_path: Path) -> None:
    items = [item_of(pairs(12), [n, n + 4, n + 7]) for n in range(4)]
    recorders = Recorder(), Recorder()
    trained(tmp_path / "a", spec_of(4, log_every=1), Scripted(items), watchers=[recorders[0]])
    trained(tmp_path / "b", spec_of(4, log_every=4), Scripted(items), watchers=[recorders[1]])
    each, (whole,) = recorders[0].of("step"), recorders[1].of("step")
    labels = [item.labels for item in items]
    for name in ("loss", "nll"):
        expected = sum(n * event[name] for n, event in zip(labels, each, strict=True)) / sum(labels)
        assert whole[name] == pytest.approx(expected, rel=1e-9)
    assert whole["gradient"] == pytest.approx(sum(event["gradient"] for event in each) / 4)
    assert [event["padding"] for event in each] == pytest.approx([item.padding / item.places for item in items])
    assert whole["padding"] == pytest.approx(sum(i.padding for i in items) / sum(i.places for i in items))
    assert 0 < whole["padding"] < 1
    assert [event["labels"] for event in each] == np.cumsum(labels).tolist()
    model = tiny()
    first = model.loss(items[0].batch)
    assert each[0]["loss"] == pytest.approx(float((first.total / labels[0]).detach()), rel=1e-12)
    assert each[0]["nll"] == pytest.approx(float((first.nll / labels[0]).detach()), rel=1e-12)
    assert each[0]["loss"] != each[0]["nll"]  # the model smooths its labels


def test_logged_speed_excludes_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(loop, "LogWindow", lambda: LogWindow(began=now[0]))
    recorder = Recorder()
    item = item_of(pairs(4), range(4))

    def measure(model: Model) -> Metrics:
        now[0] += 1000
        return {"loss": 1.0}

    spec = spec_of(6, log_every=2, validate_every=2, patience=0)
    trainer = Trainer(tiny(), spec, Scripted([item]), RunFolder(tmp_path), measure, [recorder])
    original_loss = trainer.update.loss

    def loss(batch: Any) -> Loss:
        now[0] += 4
        return original_loss(batch)

    trainer.update = replace(trainer.update, loss=loss)
    trainer.fit()
    assert [event["tokens_per_second"] for event in recorder.of("step")] == [item.labels / 4] * 3
    assert [event["time"] for event in recorder.of("step")] == [8, 16, 24]
    assert [event["seconds"] for event in recorder.of("valid")] == [1000] * 3
    assert trainer.progress.seconds == 24


def test_log_of_resumed_training_has_every_step_once(tmp_path: Path) -> None:
    spec = spec_of(10, log_every=1, save_every=4)
    folder = RunFolder(tmp_path)

    def killed() -> str | None:
        if trainer.progress.step == 7:
            raise KeyboardInterrupt
        return None

    trainer = Trainer(tiny(), spec, bucketed(), folder, watchers=[Log(folder.log)])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(killed)
    latest = folder.latest()
    assert latest is not None
    trainer = Trainer(tiny(), spec, bucketed(), folder, watchers=[Log(folder.log, latest.step)])
    trainer.resume()
    trainer.fit()
    lines = [json.loads(line) for line in folder.log.read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 11))


def test_prefetching_thread_does_not_outlive_training(tmp_path: Path) -> None:
    for n, loss in enumerate((None, ValueError("broken"))):
        trainer = Trainer(tiny(), spec_of(2), bucketed(), RunFolder(tmp_path))
        if loss is not None:
            fails = lambda batch, error=loss: (_ for _ in ()).throw(error)  # noqa: E731
            trainer.update = replace(trainer.update, loss=fails)
            with pytest.raises(ValueError, match="broken"):
                trainer.fit()
        else:
            trainer.fit()
        assert trainer.prefetch is not None, n
        assert not trainer.prefetch._thread.is_alive()


def test_error_of_the_loader_ends_training(tmp_path: Path) -> None:
    class Failing(Scripted):
        def after(self, place: Place) -> Iterator[tuple[Item, Place]]:
            raise DataError("the disk is gone")
            yield

    with pytest.raises(DataError, match="the disk is gone"):
        Trainer(tiny(), spec_of(2), Failing([]), RunFolder(tmp_path)).fit()


def test_a_cpu_trains_in_float32() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert precision(TrainSpec(), cpu) is None
    assert precision(TrainSpec(precision="float32"), cuda) is None
    assert precision(TrainSpec(precision="bfloat16"), cuda) is torch.bfloat16
    assert precision(TrainSpec(precision="float16"), cuda) is torch.float16
    with pytest.raises(DataError, match=r"train\.precision: a CPU trains in float32, not bfloat16"):
        precision(TrainSpec(precision="bfloat16"), cpu)


@pytest.mark.parametrize(("real", "chosen"), [(True, torch.bfloat16), (False, torch.float16)])
def test_gpu_that_emulates_bfloat16_trains_in_float16(
    real: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: real or including_emulation)
    assert precision(TrainSpec(), torch.device("cuda")) is chosen


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        *(({name: 0}, name) for name in ("steps", "validate_every", "save_every")),
        *(({name: 0}, name) for name in ("accumulate", "log_every", "keep", "keep_state", "average", "max_skipped")),
        *(({name: -1}, name) for name in ("patience", "decode")),
        *(({"clip": -0.1}, "clip"), ({"ema": 1.0}, "ema"), ({"ema": -0.1}, "ema")),
        *(({"seed": 2**63}, "seed"), ({"seed": -(2**63) - 1}, "seed")),
        ({"choose": "last", "average": 6, "keep": 5}, "average"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        TrainSpec(**settings)
    assert raised.value.path == path


def test_constant_schedule_uses_the_peak_learning_rate(tmp_path: Path) -> None:
    trainer = trained(tmp_path, spec_of(1, schedule=Constant(), optimizer=AdamW(learning_rate=0.5)), one_batch())
    moved = [(p - q).detach().abs().max() for p, q in zip(trainer.model.parameters(), tiny().parameters(), strict=True)]
    assert float(max(moved)) == pytest.approx(0.5, rel=1e-6)  # Adam's first step is as long as its rate


def test_an_optimizer_must_be_chosen_before_training(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"train\.optimizer: is not chosen yet"):
        Trainer(tiny(), TrainSpec(steps=1), bucketed(), RunFolder(tmp_path))


def test_loss_on_source_tokens_is_divided_by_the_number_of_all_labels(tmp_path: Path) -> None:
    """The logged loss of the first step is the mean of the untrained model over source and target labels."""
    model = build(DecoderOnlyTranslator(vocab=20, d_model=16, heads=2, dropout=0.0, loss_on="all"), seed=1)
    batch, recorder = Scripted([item_of(pairs(4), range(4))]), Recorder()
    item = batch.items[0]
    loss = model.train().loss(item.batch)
    assert loss.tokens == item.places - item.padding > item.labels
    trained(tmp_path, spec_of(1, log_every=1), batch, model, watchers=[recorder])
    assert recorder.of("step")[0]["nll"] == pytest.approx(float(loss.nll.detach() / loss.tokens), rel=1e-5)
