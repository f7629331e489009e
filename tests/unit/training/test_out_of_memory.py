"""A step that lacks memory is computed in parts, with the gradient of the whole step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.batch import Batch, translation
from regard.data.batching import Packing
from regard.data.loader import BatchLoader, Examples
from regard.data.objectives import Translation
from regard.errors import OutOfMemoryError
from regard.models.loss import Loss
from regard.training.checkpoint import RunFolder
from regard.training.executor import Compiled, Eager, StepExecutor, StepResult, StepScalars
from regard.training.out_of_memory import RowMemoryError, SplitSteps, label_count, positions, shape, split
from regard.training.trainer import Trainer
from tests.unit.training.test_executor import LACK, model, scalars, update, weights
from tests.unit.training.test_executor import Events as ExecutorEvents
from tests.unit.training.test_trainer import Recorder, Scripted, copied, item_of, pairs, same, spec_of, tiny

WIDE = translation([([5, 6, 7, 4], [8, 9]), ([3, 4], [6]), ([9], [9, 8, 7, 6, 5]), ([4, 4], [3]), ([6, 7], [5, 5])])
NARROW = translation([([5, 6], [8]), ([3, 4], [6])])


class Events(ExecutorEvents):
    """The "split" events."""

    def __call__(self, event: str, **values: Any) -> None:
        assert event == "split"
        self.append(values)


def limited(loss: Callable[[Batch], Loss], limit: int, sizes: list[int]) -> Callable[[Batch], Loss]:
    """A loss that lacks memory for batches of more than `limit` positions, after half of its work."""

    def run(batch: Batch) -> Loss:
        sizes.append(positions(batch))
        if positions(batch) > limit:
            loss(batch).total.backward()
            raise LACK
        return loss(batch)

    return run


def splitter(limit: int, dropout: float = 0.0) -> tuple[SplitSteps, Events, list[int]]:
    events, sizes = Events(), list[int]()
    network = model(dropout)
    step = update(network)
    step = replace(step, loss=limited(network.loss, limit, sizes))
    return SplitSteps(Eager(step), step, events, {}), events, sizes


@pytest.mark.parametrize("limit", [10**9, 40, 30, 20, 12])
@pytest.mark.parametrize("batches", [[WIDE], [WIDE, NARROW], [NARROW, WIDE, WIDE]])
def test_the_parts_of_a_step_have_the_gradient_of_the_whole(limit: int, batches: Sequence[Batch]) -> None:
    tested, _, _ = splitter(limit)
    reference = update(model())
    for seed in range(3):
        actual = tested.run(batches, scalars(*batches), seed)
        expected = Eager(reference).run(batches, scalars(*batches), seed)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights(tested.eager.update.model), weights(reference.model), rtol=1e-6, atol=1e-8)


def test_the_number_of_parts_of_a_shape_is_kept() -> None:
    tested, events, sizes = splitter(limit=30)  # WIDE has 5 rows of 5 + 6 positions
    assert (positions(WIDE), shape(WIDE)) == (55, "5x5/5x6")
    tested.run([WIDE], scalars(WIDE), 1)
    assert sizes == [55, 22, 33, 11, 11, 11, 22]
    assert [(event["rows"], event["parts"], event["shape"]) for event in events] == [
        (5, 2, "5x5/5x6"),
        (5, 4, "5x5/5x6"),
    ]
    assert events[0]["why"] == "CUDA out of memory. Tried to allocate 20.00 GiB."
    sizes.clear()
    tested.run([WIDE], scalars(WIDE), 2)
    tested.run([NARROW], scalars(NARROW), 3)
    assert len(events) == 2
    assert sizes[-1] == positions(NARROW)
    assert max(sizes) <= 30
    assert tested.parts == {"5x5/5x6": 4}


def test_a_compiled_step_that_lacks_memory_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, reports = list[int](), list[dict[str, Any]]()
    monkeypatch.setattr(torch, "compile", lambda loss, **_: limited(loss, 30, sizes))
    step, reference, events = update(model()), update(model()), Events()
    inner = Compiled(step, False, lambda _, **values: reports.append(values))
    tested = SplitSteps(inner, step, events, {})
    for seed, batch in enumerate([WIDE, NARROW, WIDE]):
        tested.run([batch], scalars(batch), seed)
        Eager(reference).run([batch], scalars(batch), seed)
    torch.testing.assert_close(weights(step.model), weights(reference.model), rtol=1e-6, atol=1e-8)
    assert [(event["rows"], event["parts"]) for event in events] == [(5, 2)]
    assert sizes == [positions(WIDE), positions(NARROW)]  # batches that fit still run compiled
    assert reports == []


def test_the_random_numbers_of_a_repeated_step_are_seeded_again() -> None:
    first, _, _ = splitter(limit=30, dropout=0.5)
    second, _, _ = splitter(limit=30, dropout=0.5)
    second.parts |= {shape(WIDE): 4}  # as after a resume
    torch.rand(5)
    first.run([WIDE], scalars(WIDE), 7)
    second.run([WIDE], scalars(WIDE), 7)
    assert torch.equal(weights(first.eager.update.model), weights(second.eager.update.model))


def test_a_row_that_does_not_fit_alone_is_named() -> None:
    tested, events, _ = splitter(limit=10)
    with pytest.raises(
        RowMemoryError, match=r"^row 3 of 5 in batch 2 of the step, with 2 source and 6 target tokens,$"
    ):
        tested.run([NARROW, WIDE], scalars(NARROW, WIDE), 1)
    assert tested.parts == {shape(WIDE): 5, shape(NARROW): 2}
    assert len(events) == 4


def test_other_errors_are_not_retried() -> None:
    step = replace(update(model()), loss=lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        SplitSteps(Eager(step), step, Events(), {}).run([WIDE], scalars(WIDE), 1)


def test_a_shortage_after_the_weights_may_have_changed_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = update(model(), ema=True), list[int]()

    def average(*_: Any) -> None:
        calls.append(1)
        raise LACK

    monkeypatch.setattr(type(step), "_update_average", average)
    events = Events()
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        SplitSteps(Eager(step), step, events, {}).run([WIDE], scalars(WIDE), 1)
    assert (calls, events) == ([1], [])


def test_a_captured_graph_is_released_before_the_step_is_repeated() -> None:
    class Graph(StepExecutor):
        released = 0

        def run(self, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> StepResult:
            raise LACK

        def release(self) -> None:
            self.released += 1

    graph, step = Graph(), update(model())
    tested = SplitSteps(graph, step, Events(), {})
    tested.run([WIDE], scalars(WIDE), 1)
    assert graph.released == 1
    assert tested.parts == {shape(WIDE): 2}


# -- parts of batches


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_have_all_rows_in_order(parts: int) -> None:
    batch = replace(WIDE, weights=torch.rand(WIDE.target.shape))
    pieces = list(split(batch, parts))
    assert len(pieces) == parts
    assert max(len(piece.target) for piece in pieces) - min(len(piece.target) for piece in pieces) <= 1
    for name in ("target", "labels", "source", "source_seg", "target_seg", "weights"):
        assert torch.equal(torch.cat([getattr(piece, name) for piece in pieces]), getattr(batch, name))
    assert sum(label_count(piece) for piece in pieces) == pytest.approx(label_count(batch))


def test_labels_are_counted_as_in_the_loss() -> None:
    assert label_count(WIDE) == float(model().loss(WIDE).tokens)
    assert label_count(replace(WIDE, target_seg=None)) == 30
    assert label_count(Batch(WIDE.target, torch.zeros(5, dtype=torch.int64), WIDE.target_seg)) == 5


def test_packed_rows_are_split_by_rows() -> None:
    """The last batch of an epoch is filled up with empty rows, and a part without labels is left out."""
    loader = BatchLoader(Examples([pairs(20)], [1.0], Translation()), Packing(160, 20), seed=5)
    items = list(loader.once())
    batch = items[-1].batch
    empty = [bool((batch.target_seg[row] == 0).all()) for row in range(len(batch.target))]  # type: ignore[reportOptionalSubscript]
    for each in (items[0].batch, batch):
        network, reference = model(), model()
        step, whole = update(network), update(reference)
        tested = SplitSteps(Eager(step), step, Events(), {shape(each): len(each.target)})
        Eager(whole).run([each], scalars(each), 1)
        tested.run([each], scalars(each), 1)
        torch.testing.assert_close(weights(network), weights(reference), rtol=1e-6, atol=1e-8)
    assert any(empty) or len(items) > 1


# -- in training


def lacking(trainer: Trainer, limit: int) -> None:
    trainer.update = replace(trainer.update, loss=limited(trainer.update.loss, limit, []))
    trainer.executor = Eager(trainer.update)


def training(path: Path, limit: int, recorder: Recorder | None = None, dropout: float = 0.0) -> Trainer:
    table = pairs(24, seed=3)
    items = [item_of(table, range(a, b)) for a, b in pairwise([0, 5, 11, 14, 24])]
    path.mkdir(exist_ok=True)
    spec = spec_of(8, accumulate=2, ema=0.5)
    trainer = Trainer(tiny(dropout), spec, Scripted(items), RunFolder(path), None, [recorder] if recorder else ())
    lacking(trainer, limit)
    return trainer


def test_training_that_lacks_memory_gives_the_same_weights(tmp_path: Path) -> None:
    recorder = Recorder()
    split_up, whole = training(tmp_path / "a", 60, recorder), training(tmp_path / "b", 10**9)
    assert split_up.fit().finished
    assert whole.fit().finished
    events = recorder.of("split")
    assert events
    assert {"rows", "parts", "shape", "why", "step"} <= events[0].keys()
    assert len(events) <= 8  # every shape is split once, not at every step
    differences: list[Tensor] = [
        (a - b).abs().max() for a, b in zip(split_up.model.parameters(), whole.model.parameters(), strict=True)
    ]
    assert max(float(each.detach()) for each in differences) < 1e-9


def test_split_training_resumes_exactly(tmp_path: Path) -> None:
    """With dropout, whose random numbers depend on the number of parts. Memory is no longer short after the resume."""
    straight = training(tmp_path / "a", 60, dropout=0.3)
    straight.fit()
    first = training(tmp_path / "b", 60, dropout=0.3)
    first.fit(lambda: "enough" if first.progress.step == 5 else None)
    second = training(tmp_path / "b", 10**9, dropout=0.3)
    assert second.resume()
    assert second.progress.parts == first.progress.parts != {}
    second.fit()
    assert same(copied(second.model), copied(straight.model))


def test_an_example_that_does_not_fit_ends_training_with_its_length(tmp_path: Path) -> None:
    trainer = training(tmp_path, 3)
    trainer.loader = BatchLoader(Examples([pairs(24)], [1.0], Translation()), Packing(160, 20), seed=5)
    with pytest.raises(OutOfMemoryError) as error:
        trainer.fit()
    assert "memory ran out on cpu" in str(error.value)
    assert " does not fit even alone; lower data.max_len, or choose a smaller model" in str(error.value)
