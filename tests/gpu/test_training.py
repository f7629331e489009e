"""Training on a GPU: steps captured as CUDA graphs learn like eager steps, and obstacles to a capture are logged."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.exc import OperatorIssue

from regard.data.batching import Batching, Buckets, Packing
from regard.data.loader import BatchLoader, Examples, Place
from regard.data.objectives import Item, Translation
from regard.data.token_store import Table
from regard.models.base import Model
from regard.models.build import build
from regard.presets import preset
from regard.training import executor
from regard.training.checkpoint import RunFolder
from regard.training.executor import Captured, Quickest
from regard.training.optim import Adafactor, AdamW, Muon
from regard.training.schedule import Constant
from regard.training.spec import TrainSpec
from regard.training.tensor_files import read_weights, weights_digest
from regard.training.trainer import Trainer
from regard.variants import apply

pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"vocab": 200, "d_model": 64, "heads": 4, "encoder.depth": 2, "decoder.depth": 2}


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


class Notes(list[dict[str, Any]]):
    """A watcher that stores all events."""

    def note(self, event: Any) -> None:
        self.append(dict(event))

    @property
    def executors(self) -> list[dict[str, Any]]:
        return [event for event in self if event["event"] == "executor"]


def loader(batching: Batching, pairs: int = 150) -> BatchLoader:
    rng = np.random.default_rng(0)
    sides = [[rng.integers(3, 200, rng.integers(2, 20)).tolist() for _ in range(pairs)] for _ in range(2)]
    table = Table.of(source=[[*s, 2] for s in sides[0]], target=[[1, *t, 2] for t in sides[1]])
    return BatchLoader(Examples([table], [1.0], Translation()), batching, seed=5)


def model(*variants: str) -> Model:
    spec: Any = preset("transformer_small", **SMALL, dropout=0.1)
    for name in variants:
        spec = apply(name, spec)
    return build(spec, "cuda", seed=1)


SPEC = TrainSpec(steps=40, optimizer=AdamW(learning_rate=3e-3), log_every=5, patience=0, decode=0, compile=False)
PACKED = Packing(512, 64)


def trained(
    folder: Path, spec: TrainSpec = SPEC, built: Model | None = None, batching: Batching = PACKED
) -> tuple[Trainer, Notes]:
    notes = Notes()
    folder.mkdir(exist_ok=True)
    trainer = Trainer(built or model(), spec, loader(batching), RunFolder(folder), watchers=[notes])
    trainer.fit()
    return trainer, notes


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare weights. CUDA sums the gradients of a table in any order, so that even two eager runs may differ.

    Biases are not compared: the gradient of a key bias is only rounding error, which Adam scales up.
    """
    for name, tensor in expected.items():
        if not name.endswith("bias"):
            torch.testing.assert_close(
                actual[name], tensor, rtol=2e-2, atol=5e-3, msg=lambda text, n=name: f"{n}: {text}"
            )


def disable_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "capture_obstacle", lambda *_: "disabled for this test")


@pytest.mark.parametrize(
    "changes", [{}, {"accumulate": 2}, {"ema": 0.9}, {"precision": "float32"}, {"clip": 0.0, "validate_every": 7}]
)
def test_captured_steps_learn_like_eager_steps(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, over several epochs whose last batch has another shape, and with checkpoints in between."""
    spec = replace(SPEC, **changes)
    captured, notes = trained(tmp_path / "a", spec)
    assert isinstance(captured.executor, Quickest)
    assert [event["executor"] for event in notes.executors] == ["graph"]
    disable_graphs(monkeypatch)
    eager, eager_notes = trained(tmp_path / "b", spec)
    assert [event["executor"] for event in eager_notes.executors] == ["eager"]
    for captured_step, eager_step in zip(
        [e for e in notes if e["event"] == "step"], [e for e in eager_notes if e["event"] == "step"], strict=True
    ):
        assert captured_step["loss"] == pytest.approx(eager_step["loss"], rel=1e-5)
        assert captured_step["learning_rate"] == eager_step["learning_rate"]
    close(weights(captured), weights(eager))


def test_a_compiled_step_learns_the_same(tmp_path: Path) -> None:
    _, plain = trained(tmp_path / "a")
    _, compiled = trained(tmp_path / "b", replace(SPEC, compile=True))
    assert [event["executor"] for event in compiled.executors] == ["compiling", "compiled graph"]
    final = [[event["loss"] for event in notes if event["event"] == "step"][-1] for notes in (plain, compiled)]
    assert final[0] == pytest.approx(final[1], rel=0.05)  # dropout has another random number generator


def test_torch_compile_does_not_format_our_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would format the graph before each operator again and again, without end in a model of twelve layers."""
    formatted: list[str] = []
    monkeypatch.setattr(
        OperatorIssue, "operator_str", staticmethod(lambda target, *_: formatted.append(str(target)) or "")
    )
    torch.compiler.reset()
    with config.patch(force_disable_caches=True):
        _, notes = trained(tmp_path, replace(SPEC, compile=True))
    assert notes.executors[-1]["executor"] == "compiled graph"
    assert not [target for target in formatted if "regard" in target]


def test_a_run_continues_after_a_failed_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(loss: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def fails(*_: Any) -> Any:
            raise RuntimeError("no compiler")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    _, notes = trained(tmp_path, replace(SPEC, compile=True))
    assert [event["executor"] for event in notes.executors] == ["compiling", "graph", "graph"]
    assert "no compiler" in notes.executors[1]["why"]
    assert notes[-1]["finished"]


@pytest.mark.parametrize(
    "name", ["switch", "light_conv", "synth_dense", "universal", "transparent", "adaptive_softmax"]
)
def test_every_variant_trains_as_a_graph_or_reports_why_not(tmp_path: Path, name: str) -> None:
    _, notes = trained(tmp_path, replace(SPEC, steps=12), model(name))
    assert notes[-1]["finished"]
    (event,) = notes.executors
    assert event["executor"] == "graph" or "cannot be captured" in event["why"]


@pytest.mark.parametrize(
    ("spec", "batching", "why"),
    [
        (SPEC, Buckets(512), "many shapes"),
        (replace(SPEC, precision="float16"), Packing(512, 64), "float16"),
        (replace(SPEC, optimizer=Adafactor(learning_rate=1e-2)), Packing(512, 64), "optimizer"),
        (replace(SPEC, checkpoint_layers=True), Packing(512, 64), "train.checkpoint_layers"),
    ],
)
def test_obstacles_to_a_graph_are_reported(tmp_path: Path, spec: TrainSpec, batching: Batching, why: str) -> None:
    _, notes = trained(tmp_path, replace(spec, steps=8), batching=batching)
    assert [event["executor"] for event in notes.executors] == ["eager"]
    assert why in notes.executors[0]["why"]
    assert notes[-1]["finished"]


def test_a_resumed_run_is_captured_again(tmp_path: Path) -> None:
    spec = replace(SPEC, save_every=20)
    whole, _ = trained(tmp_path / "a", spec)
    notes = Notes()
    (tmp_path / "b").mkdir()
    first = Trainer(model(), spec, loader(Packing(512, 64)), RunFolder(tmp_path / "b"), watchers=[notes])
    first.fit(lambda: "enough" if first.progress.step == 23 else None)
    second = Trainer(model(), spec, loader(Packing(512, 64)), RunFolder(tmp_path / "b"), watchers=[notes])
    assert second.resume()
    second.fit()
    assert isinstance(second.executor, Quickest)
    assert isinstance(second.executor.plain, Captured)
    assert second.executor.plain.graph is not None
    close(weights(second), weights(whole))


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "ema": 0.9}, {"precision": "float32"}])
def test_interrupted_training_with_graphs_gives_the_same_bits(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Steps before a capture run eagerly, so another share of the steps is captured after each interruption."""
    spec = replace(SPEC, steps=90, save_every=10, **changes)
    _, notes = trained(tmp_path / "a", spec)
    assert [event["executor"] for event in notes.executors] == ["graph"]
    (tmp_path / "b").mkdir()
    for stop in (13, 20, 47, 71, None):
        session = Trainer(model(), spec, loader(PACKED), RunFolder(tmp_path / "b"))
        session.resume()
        session.fit(lambda s=session, at=stop: "enough" if s.progress.step == at else None)
    actual, expected = (weights_digest(read_weights(RunFolder(tmp_path / name).final)) for name in "ba")
    assert actual == expected


class Repeated(BatchLoader):
    """The given batches of one shape, repeated without end."""

    one_shape = True  # type: ignore[reportAssignmentType]

    def __init__(self, items: Sequence[Item], like: BatchLoader) -> None:
        super().__init__(like.examples, like.batching, like.seed)
        self.items = items

    def after(self, place: Place) -> Iterator[tuple[Item, Place]]:
        for position in count(place.position):
            yield self.items[position % len(self.items)], Place(0, position + 1)


@pytest.mark.parametrize("optimizer", [AdamW(3e-3), Muon(1e-2, rest=AdamW(3e-3))])
def test_a_captured_step_with_a_nan_loss_changes_nothing(tmp_path: Path, optimizer: Any) -> None:
    """Batches 0 to 5, and from then on always one whose label weights are NaN: all weights are those of step 6."""
    item = next(loader(PACKED).once())
    ones = torch.ones(item.batch.target.shape)
    good, bad = (
        replace(item, batch=replace(item.batch, weights=w * (item.batch.target_seg > 0)))  # type: ignore[reportOptionalOperand]
        for w in (ones, ones * float("nan"))
    )
    spec = replace(SPEC, steps=16, ema=0.9, optimizer=optimizer, max_skipped=100, log_every=4)
    results = []
    for name, items, steps in (("a", [good] * 8 + [bad] * 8, 16), ("b", [good] * 8, 8)):
        notes = Notes()
        (tmp_path / name).mkdir()
        given = replace(spec, steps=steps, schedule=Constant())
        trainer = Trainer(model(), given, Repeated(items, loader(PACKED)), RunFolder(tmp_path / name), watchers=[notes])
        trainer.fit()
        assert [event["executor"] for event in notes.executors] == ["graph"]
        results.append((trainer, notes))
    (skipping, notes), (plain, _) = results
    assert [event["step"] for event in notes if event["event"] == "skipped"] == list(range(9, 17))
    assert skipping.ema is not None
    assert plain.ema is not None
    for name, tensor in weights(plain).items():
        assert torch.equal(weights(skipping)[name], tensor)
        assert torch.equal(skipping.ema[name], plain.ema[name])
    for name, tensor in plain.optimizer.state().items():
        assert torch.equal(skipping.optimizer.state()[name], tensor)


def test_a_step_that_lacks_memory_is_computed_in_parts(tmp_path: Path) -> None:
    """The memory of the process is limited to less than the first steps of the same training need."""
    large = Packing(512 * 64, 64)
    spec = replace(SPEC, steps=12, accumulate=1, log_every=1, precision="float32")
    built = build(preset("transformer_small", **SMALL, dropout=0.0), "cuda", seed=1)
    torch.cuda.reset_peak_memory_stats()
    _, expected = trained(tmp_path / "a", replace(spec, compile=False), built, large)
    share = 0.7 * torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    del built
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        again = build(preset("transformer_small", **SMALL, dropout=0.0), "cuda", seed=1)
        _, notes = trained(tmp_path / "b", spec, again, large)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [event for event in notes if event["event"] == "split"]
    losses = [[event["loss"] for event in each if event["event"] == "step"] for each in (notes, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_checkpoint_is_a_copy_of_its_step(tmp_path: Path) -> None:
    """Training changes the weights on the GPU while they are copied and written."""
    spec = replace(SPEC, steps=30, save_every=1, keep=30, keep_state=30, ema=0.9)
    (tmp_path / "a").mkdir()
    trainer = Trainer(model(), spec, loader(PACKED), RunFolder(tmp_path / "a"))
    seen: dict[int, dict[str, Tensor]] = {}

    def follow() -> None:
        assert trainer.ema is not None
        seen[trainer.progress.step] = {name: tensor.cpu().clone() for name, tensor in trainer.ema.items()}

    trainer.fit(follow)
    for step in (1, 7, 13, 29):
        saved = read_weights(trainer.folder.weights(step))
        assert all(torch.equal(saved[name], tensor) for name, tensor in seen[step].items())


BASELINES = {"rnn": "rnn", "rnn_attention": "rnn_attention", "convs2s": "convs2s", "bytenet": "bytenet_small"}


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_learn_in_bfloat16_as_in_float32(tmp_path: Path, name: str) -> None:
    spec: Any = preset(BASELINES[name], vocab=200, dropout=0.0)
    last = []
    for precision in ("float32", "bfloat16"):
        built = build(spec, "cuda", seed=1)
        train_spec = replace(SPEC, precision=precision, optimizer=AdamW(learning_rate=1e-3))
        _, notes = trained(tmp_path / precision, train_spec, built, Buckets(512))
        assert "many shapes" in notes.executors[0]["why"]
        losses = [event["loss"] for event in notes if event["event"] == "step"]
        assert losses[-1] < losses[0]
        last.append(losses[-1])
    assert last[0] == pytest.approx(last[1], rel=0.02)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_compute_the_same_on_gpu_and_cpu(name: str) -> None:
    spec: Any = preset(BASELINES[name], vocab=200, dropout=0.0)
    on_cpu, on_gpu = (build(spec, device, seed=1).double().eval() for device in ("cpu", "cuda"))
    on_gpu.load_state_dict(on_cpu.state_dict())
    batch = next(loader(Buckets(512)).once()).batch
    with torch.no_grad():
        gpu_loss, cpu_loss = on_gpu.loss(batch.to("cuda")), on_cpu.loss(batch)
    torch.testing.assert_close(gpu_loss.total.cpu(), cpu_loss.total, rtol=1e-10, atol=1e-10)
