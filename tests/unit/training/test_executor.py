"""Step executors: all compute the same step, and a step that cannot be compiled or captured runs eagerly."""

import gc
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from regard.batch import Batch, translation
from regard.models.base import Model
from regard.models.build import build
from regard.presets import preset
from regard.training import executor, mfu
from regard.training.executor import (
    Captured,
    Compiled,
    Eager,
    Quickest,
    StepExecutor,
    StepResult,
    StepScalars,
    Update,
    capture_obstacle,
    choose_executor,
    description,
)
from regard.training.optim import AdamW, Optimizer, clip
from regard.training.out_of_memory import MemoryShortage
from regard.training.parallel.gradients import WARM

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"vocab": 20, "d_model": 16, "heads": 2, "encoder.depth": 1, "decoder.depth": 1}
FIRST = translation([([5, 6, 7], [8, 9]), ([3, 4], [6])])
SECOND = translation([([9, 8, 7], [4, 5]), ([6, 6], [9])])
ODD = translation([([5, 6], [8, 9, 10])])


def model(dropout: float = 0.0) -> Model:
    return build(preset("transformer_small", **SMALL, dropout=dropout), seed=3).double().train()


def update(network: Model, ema: bool = False, most: float = 1.0) -> Update:
    optimizer = AdamW(learning_rate=0.01).build(network)
    averages = {name: p.detach().clone() for name, p in network.named_parameters()} if ema else None
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Update(network, network.loss, optimizer, most, CPU, None, scaler, averages)


def weights(of: Model) -> Tensor:
    return torch.cat([p.detach().flatten() for p in of.parameters()])


def scalars(*batches: Batch, decay: float = 0.0) -> StepScalars:
    counts = [int((batch.target_seg != 0).sum()) for batch in batches if batch.target_seg is not None]
    return StepScalars(float(sum(counts)), decay, [count / sum(counts) for count in counts])


class Events(list[dict[str, Any]]):
    """The events that were emitted."""

    def __call__(self, event: str, **values: Any) -> None:
        assert event == "executor"
        assert description(values)
        self.append(values)

    @property
    def names(self) -> list[str]:
        return [event["executor"] for event in self]


def test_a_step_follows_the_mean_loss_of_all_labels() -> None:
    tested, reference = model(), model()
    result = Eager(update(tested, most=0.5)).run([FIRST, ODD], scalars(FIRST, ODD), 1)
    optimizer = AdamW(learning_rate=0.01).build(reference)
    losses = [reference.loss(batch) for batch in (FIRST, ODD)]
    (sum(loss.total for loss in losses) / (5 + 4)).backward()  # type: ignore[reportAttributeAccessIssue]
    norm = clip(reference.parameters(), 0.5)
    optimizer.step()
    torch.testing.assert_close(weights(tested), weights(reference), rtol=1e-12, atol=1e-14)
    assert result.loss.item() == pytest.approx(sum(loss.total.item() for loss in losses))
    assert result.nll.item() == pytest.approx(sum(loss.nll.item() for loss in losses))
    assert result.norm.item() == pytest.approx(norm.item())
    assert all(p.grad is None for p in tested.parameters())


def test_moving_average_uses_the_given_decay() -> None:
    network = model()
    step = update(network, ema=True)
    before = weights(network).clone()
    Eager(step).run([FIRST], scalars(FIRST, decay=0.75), 1)
    assert step.ema is not None
    average = torch.cat([step.ema[name].flatten() for name, _ in network.named_parameters()])
    torch.testing.assert_close(average, 0.75 * before + 0.25 * weights(network))


def test_the_seed_determines_the_random_numbers_of_a_step() -> None:
    first, second, other = (model(dropout=0.5) for _ in range(3))
    for network, seed in ((first, 7), (second, 7), (other, 8)):
        torch.rand(3)
        Eager(update(network)).run([FIRST], scalars(FIRST), seed)
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


LACK = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nAnd more.")


def failing(after: int, error: Exception | None = None) -> Callable[..., Any]:
    """A fake torch.compile, whose compiled loss fails after `after` calls, when gradients have been computed."""

    def compile_(loss: Callable[[Batch], Any], **_: Any) -> Callable[[Batch], Any]:
        calls = 0

        def run(batch: Batch) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                loss(batch).total.backward()
                raise error or RuntimeError("no compiler here\nand a long story")
            return loss(batch)

        return run

    return compile_


def test_a_failed_compilation_is_reported_and_the_step_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", failing(after=1))
    tested, reference, events = model(dropout=0.2), model(dropout=0.2), Events()
    compiled, eager = Compiled(update(tested), True, events), Eager(update(reference))
    for seed, batch in enumerate([FIRST, SECOND, FIRST, SECOND]):
        compiled.run([batch], scalars(batch), seed)
        eager.run([batch], scalars(batch), seed)
    assert torch.equal(weights(tested), weights(reference))
    assert events == [{"executor": "eager", "why": "compiling failed: RuntimeError: no compiler here"}]


def test_an_error_of_the_step_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda loss, **_: loss)
    broken = Compiled(replace(update(model()), loss=lambda _: 1 / 0), False, Events())
    broken.compiled = Eager(broken.eager.update)
    with pytest.raises(ZeroDivisionError):
        broken.run([FIRST], scalars(FIRST), 1)


def test_only_the_common_shape_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_batches: list[Batch] = []

    def compile_(loss: Callable[[Batch], Any], dynamic: bool | None, **_: Any) -> Callable[[Batch], Any]:
        assert dynamic is False
        return lambda batch: (compiled_batches.append(batch), loss(batch))[1]

    monkeypatch.setattr(torch, "compile", compile_)
    compiled = Compiled(update(model()), True, Events())
    for batch in (ODD, FIRST, SECOND, ODD, FIRST):
        compiled.run([batch], scalars(batch), 1)
    assert [id(batch) for batch in compiled_batches] == [id(SECOND), id(FIRST)]


class Stream:
    """Simulates a CUDA stream without a GPU."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def wait_stream(self, other: "Stream") -> None:
        """Do nothing."""


class Graph:
    """Simulates a CUDA graph without a GPU: replaying it runs the captured step."""

    made: ClassVar[list["Graph"]] = []

    def __init__(self, step: Callable[[], object]) -> None:
        self.step, self.replays = step, 0
        type(self).made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self.step()

    def pool(self) -> str:
        return "a pool"


def record_capture(step: Callable[[], object], stream: Stream, pool: str | None) -> Graph:
    """Simulate a capture, which does not run the step but allocates its result."""
    (inner,) = [cell.cell_contents for cell in step.__closure__ or ()]
    (owner,) = [
        cell.cell_contents for cell in inspect.unwrap(inner).__closure__ if isinstance(cell.cell_contents, Captured)
    ]
    assert (pool is None) == (owner.earlier == [])
    owner.result = torch.zeros(3, dtype=torch.float64)

    def run() -> None:
        result = owner.result
        step()
        assert result is not None
        result.copy_(owner.result)  # type: ignore[reportArgumentType]
        owner.result = result

    assert stream is owner.stream
    return Graph(run)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(executor, "pinned", torch.tensor)
    monkeypatch.setattr(executor.graphs, "capture", record_capture)
    monkeypatch.setattr(executor.graphs, "watched", lambda step: (step(), None))
    monkeypatch.setattr(torch, "compile", lambda loss, **_: loss)
    return Graph.made


def run(of: StepExecutor, batches: Sequence[Sequence[Batch]], decay: float = 0.5) -> list[StepResult]:
    return [of.run(some, scalars(*some, decay=decay), seed) for seed, some in enumerate(batches)]


@pytest.mark.parametrize("each", [1, 2])
def test_captured_step_equals_an_eager_step(graphs: list[Graph], each: int) -> None:
    """With dropout, a moving average, changing shapes and several batches per step."""
    tested, reference = (update(model(dropout=0.2), ema=True) for _ in range(2))
    batches = [[FIRST, SECOND][:each], [SECOND, ODD][:each]] * 6 + [[ODD] * each, [FIRST, FIRST][:each]]
    events = Events()
    actual, expected = run(Captured(tested, events), batches), run(Eager(reference), batches)
    torch.testing.assert_close(weights(tested.model), weights(reference.model), rtol=1e-6, atol=1e-9)
    assert tested.ema is not None
    assert reference.ema is not None
    for name in tested.ema:
        torch.testing.assert_close(tested.ema[name], reference.ema[name], rtol=1e-6, atol=1e-8)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.stack([*a]), torch.stack([*b]), rtol=1e-6, atol=1e-9)
    assert events.names == ["graph"]
    alike = len(batches) - 1 if each == 1 else 7  # of the shape that was met again first
    assert [graph.replays for graph in graphs] == [alike - 1 - WARM] * each


def test_a_step_that_synchronises_is_never_captured(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.graphs, "watched", lambda step: (step(), "it asks the host"))
    tested, reference, events = update(model()), update(model()), Events()
    run(Quickest(tested, events, lambda _: 1.0, None), [[FIRST]] * 8)
    run(Eager(reference), [[FIRST]] * 8)
    assert graphs == []
    assert torch.equal(weights(tested.model), weights(reference.model))
    assert events == [{"executor": "eager", "why": "this model cannot be captured: it asks the host"}]


def test_steps_run_eagerly_after_a_failed_capture(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: Callable[[], object], stream: Stream, pool: str | None) -> Graph:
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(executor.graphs, "capture", fails)
    tested, reference, events = update(model()), update(model()), Events()
    run(Quickest(tested, events, lambda _: 1.0, None), [[FIRST]] * 8)
    run(Eager(reference), [[FIRST]] * 8)
    assert graphs == []
    assert torch.equal(weights(tested.model), weights(reference.model))
    assert events.names == ["eager"]
    assert "not permitted" in events[0]["why"]


@pytest.mark.parametrize(("left", "compiles"), [(190.0, False), (210.0, True)])
def test_compilation_starts_only_if_it_saves_time(graphs: list[Graph], left: float, compiles: bool) -> None:
    events, before = Events(), 1 + WARM + executor.TIMED
    quickest = Quickest(update(model()), events, lambda _: left, None)
    run(quickest, [[FIRST]] * (before + 8))
    assert events.names == ["graph", *(["compiling", "compiled graph"] if compiles else [])]
    assert [graph.replays for graph in graphs] == ([1 + executor.TIMED, 7 - WARM] if compiles else [executor.TIMED + 8])
    assert (quickest.plain.graph is None) == compiles  # whose memory is given back


def test_train_compile_false_never_compiles_and_true_compiles_at_once(graphs: list[Graph]) -> None:
    never, now = Events(), Events()
    for events, compiles in ((never, False), (now, True)):
        run(Quickest(update(model()), events, lambda _: 1e9, compiles), [[FIRST]] * 10)
    assert never.names == ["graph"]
    assert now.names == ["compiling", "compiled graph"]
    assert [graph.replays for graph in graphs] == [9 - WARM] * 2


def test_batches_of_other_shapes_run_without_compilation(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_batches: list[Batch] = []

    def compile_(loss: Callable[[Batch], Any], dynamic: bool | None, **_: Any) -> Callable[[Batch], Any]:
        assert dynamic is False
        return lambda batch: (compiled_batches.append(batch), loss(batch))[1]

    monkeypatch.setattr(torch, "compile", compile_)
    run(Quickest(update(model()), Events(), lambda _: 1.0, True), [[FIRST], [ODD], [SECOND], [ODD], [FIRST], [ODD]])
    assert [batch.target.shape for batch in compiled_batches] == [FIRST.target.shape] * 2
    assert graphs == []


def test_a_failed_compilation_falls_back_to_the_plain_graph(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", failing(after=2))
    tested, reference, events = update(model()), update(model()), Events()
    run(Quickest(tested, events, lambda _: 1.0, True), [[FIRST]] * 9)
    run(Eager(reference), [[FIRST]] * 9)
    torch.testing.assert_close(weights(tested.model), weights(reference.model), rtol=1e-6, atol=1e-9)
    assert events.names == ["compiling", "graph", "graph"]
    assert "no compiler here" in events[1]["why"]
    assert [graph.replays for graph in graphs] == [9 - 1 - 2 - WARM]


def test_the_plain_graph_is_kept_if_the_compiled_step_lacks_memory(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", failing(after=0, error=LACK))
    tested, reference, events = update(model()), update(model()), Events()
    steps = [[FIRST]] * (1 + WARM + executor.TIMED + 4)
    run(Quickest(tested, events, lambda _: 1e9, None), steps)
    run(Eager(reference), steps)
    torch.testing.assert_close(weights(tested.model), weights(reference.model), rtol=1e-6, atol=1e-9)
    assert events.names == ["graph", "compiling", "graph"]
    assert events[2]["why"].startswith("memory ran out in the compiled step: OutOfMemoryError: CUDA out of memory")


def test_a_compiled_step_that_lacks_memory_is_raised_if_no_graph_has_run(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", failing(after=0, error=LACK))
    events = Events()
    with pytest.raises(torch.OutOfMemoryError):
        run(Quickest(update(model()), events, lambda _: 1.0, True), [[FIRST]] * 3)
    assert events.names == ["compiling"]
    assert graphs == []


def test_a_compiled_step_that_cannot_be_captured_is_reported(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(step: Callable[[], object], stream: Stream, pool: str | None) -> Graph:
        raise LACK

    monkeypatch.setattr(executor.graphs, "capture", fails)
    events = Events()
    run(Quickest(update(model()), events, lambda _: 1.0, True), [[FIRST]] * 6)
    assert events[1]["why"].startswith("the compiled step cannot be captured: OutOfMemoryError")


def test_capture_obstacles_are_named() -> None:
    step = update(model())
    assert capture_obstacle(step, True) is None
    assert "many shapes" in str(capture_obstacle(step, False))
    assert "float16" in str(capture_obstacle(replace(step, scaler=torch.amp.GradScaler("cpu", enabled=True)), True))
    other = Optimizer(step.model, {"sgd": torch.optim.SGD(step.model.parameters(), lr=0.1)})
    assert "optimizer" in str(capture_obstacle(replace(step, optimizer=other), True))


def test_a_cpu_runs_eagerly_unless_compile_is_set() -> None:
    events = Events()
    assert isinstance(choose_executor(update(model()), True, None, lambda _: 1e9, events), Eager)
    assert isinstance(choose_executor(update(model()), True, False, lambda _: 1e9, events), Eager)
    assert isinstance(choose_executor(update(model()), True, True, lambda _: 1e9, events), Compiled)
    assert events == []


def test_batches_of_equal_shapes_can_be_copied_into_each_other() -> None:
    assert FIRST.alike(SECOND)
    assert not FIRST.alike(ODD)
    assert not FIRST.alike(replace(SECOND, weights=torch.ones(2, 3)))
    assert not FIRST.alike(replace(SECOND, segments=2))
    copy = Batch(*(t.clone() for t in (FIRST.target, FIRST.labels, FIRST.target_seg, FIRST.source, FIRST.source_seg)))  # type: ignore[reportOptionalMemberAccess]
    places = [copy.target.data_ptr(), copy.source.data_ptr()]  # type: ignore[reportOptionalMemberAccess]
    copy.fill(SECOND)
    assert torch.equal(copy.target, SECOND.target)
    assert torch.equal(copy.source, SECOND.source)  # type: ignore[reportArgumentType]
    assert [copy.target.data_ptr(), copy.source.data_ptr()] == places  # type: ignore[reportOptionalMemberAccess]


def test_utilisation_counts_three_forward_passes() -> None:
    assert mfu.utilisation(1e9, 1e5, 1e15) == pytest.approx(0.3)
    assert mfu.peak(CPU, torch.bfloat16) is None


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_in_float16_either(what: str) -> None:
    network = model()
    step = replace(update(network, ema=True), scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    step([FIRST], scalars(FIRST), 1)
    ema = step.ema or {}
    before, average = weights(network), {name: tensor.clone() for name, tensor in ema.items()}
    if what == "loss":  # such as that of a masked token: the gradient of an infinite loss may be finite
        step = replace(
            step, loss=lambda batch: network.loss(batch)._replace(total=network.loss(batch).total + math.inf)
        )
    else:
        next(network.parameters()).register_hook(lambda gradient: gradient.fill_(math.inf))
    total, _, norm = step([FIRST], scalars(FIRST), 1)
    assert (total.isfinite(), norm.isfinite()) == ((False, True) if what == "loss" else (True, False))
    assert torch.equal(weights(network), before)
    assert all(torch.equal(ema[name], tensor) for name, tensor in average.items())


@pytest.mark.parametrize("overflow", [math.inf, math.nan])
def test_no_part_of_an_optimizer_steps_if_one_gradient_overflows(overflow: float) -> None:
    """Clipping divides all gradients by one norm, so an overflow in one part spoils the gradients of all parts."""
    network = model()
    table, *rest = network.parameters()
    parts: dict[str, torch.optim.Optimizer] = {
        "table": torch.optim.AdamW([table], lr=0.01),
        "rest": torch.optim.AdamW(rest, lr=0.01),
    }
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = Update(network, network.loss, Optimizer(network, parts), 1.0, CPU, None, scaler, None)
    step([FIRST], scalars(FIRST), 1)
    before = weights(network)
    hook = table.register_hook(lambda gradient: gradient.fill_(overflow))
    norm = step([FIRST], scalars(FIRST), 1)[-1]
    assert not norm.isfinite()
    assert step.scaler.get_scale() == 4.0
    assert torch.equal(weights(network), before)
    hook.remove()
    step([FIRST], scalars(FIRST), 1)
    assert not torch.equal(weights(network), before)
    assert weights(network).isfinite().all()


# -- out of memory


def shortage(why: str = "", tokens: int | None = 4_000_000, accumulate: int = 1, longest: int = 50) -> MemoryShortage:
    return MemoryShortage(why, CPU, tokens, accumulate, longest)


def test_half_a_batch_is_proposed_if_the_shortage_is_unknown() -> None:
    assert shortage(tokens=4096).fitting_tokens() == 2000
    assert shortage(tokens=100).fitting_tokens() == 50
    assert shortage(tokens=90).fitting_tokens() == 50  # the longest example


def test_less_is_proposed_if_far_more_memory_was_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryShortage, "_total", lambda _: 10.0 * 2**30)
    assert shortage("CUDA out of memory. Tried to allocate 80.00 GiB. GPU 0").fitting_tokens() == 400_000
    assert shortage("CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0").fitting_tokens() == 2_000_000
    requested = 80 * 2**30
    assert (
        shortage(f"can't allocate memory: you tried to allocate {requested} bytes. Error 12").fitting_tokens()
        == 400_000
    )


def test_the_memory_error_names_batch_size_options_and_checkpoint() -> None:
    message = shortage(tokens=4000, accumulate=3).message(Path("runs/one"), None)
    assert "a batch of 4,000 tokens is too much; try --set data.batching.tokens=2000" in message
    assert "--set train.accumulate=6" in message
    assert "runs/one" not in message
    message = shortage(tokens=4000).message(Path("runs/one"), 7)
    assert "the checkpoint of step 7 is intact: continue from its weights with regard train --from runs/one" in message
    assert "with regard resume runs/one on a device with more memory" in message
    assert "lower data.max_len, or choose a smaller model" in shortage(tokens=60, longest=60).message(
        Path("runs/one"), None
    )
    assert "\n" not in message


def test_a_failed_compilation_frees_its_memory_before_the_step_is_run_again() -> None:
    network, references = model(), []

    class Big:
        """Stands for a tensor of the failed step."""

    def fail(*_: Any) -> StepResult:
        big = Big()
        references.append(weakref.ref(big))
        raise RuntimeError("no compiler here")

    def check(*_: Any) -> StepResult:
        gc.collect()
        assert references[0]() is None
        return StepResult(torch.ones(()), torch.ones(()), torch.ones(()))

    compiled = Compiled(update(network), one_shape=False, emit=lambda *_, **__: None)
    assert compiled.compiled is not None
    compiled.compiled.run, compiled.eager.run = fail, check  # type: ignore[method-assign]
    compiled.run([FIRST], scalars(FIRST), 1)
