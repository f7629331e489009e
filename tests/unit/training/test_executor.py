"""Programs: a step is the same however it is run, and what cannot be compiled or captured is said and done without."""

import gc
import inspect
import math
import os
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
from regard.training import executor as program
from regard.training import mfu
from regard.training.executor import (
    Captured,
    Compiled,
    Done,
    Eager,
    Lack,
    Quickest,
    StepExecutor,
    Update,
    choose,
    facts,
    obstacle,
)
from regard.training.optim import AdamW, Optimizer, clip

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"vocab": 20, "d_model": 16, "heads": 2, "encoder.depth": 1, "decoder.depth": 1}
FIRST = translation([([5, 6, 7], [8, 9]), ([3, 4], [6])])
SECOND = translation([([9, 8, 7], [4, 5]), ([6, 6], [9])])
ODD = translation([([5, 6], [8, 9, 10])])


def model(dropout: float = 0.0) -> Model:
    return build(preset("transformer_small", **SMALL, dropout=dropout), seed=3).double().train()


def update(made: Model, ema: bool = False, most: float = 1.0) -> Update:
    optimizer = AdamW(learning_rate=0.01).build(made)
    averages = {name: p.detach().clone() for name, p in made.named_parameters()} if ema else None
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Update(made, made.loss, optimizer, most, CPU, None, scaler, averages)


def weights(of: Model) -> Tensor:
    return torch.cat([p.detach().flatten() for p in of.parameters()])


def numbers(*batches: Batch, kept: float = 0.0) -> tuple[float, ...]:
    counts = [int((batch.target_seg != 0).sum()) for batch in batches if batch.target_seg is not None]
    return (float(sum(counts)), kept, *(count / sum(counts) for count in counts))


class Told(list[dict[str, Any]]):
    """What was told."""

    def __call__(self, event: str, **values: Any) -> None:
        assert event == "program"
        assert facts(values)
        self.append(values)

    @property
    def programs(self) -> list[str]:
        return [event["program"] for event in self]


def test_a_step_follows_the_mean_loss_of_all_labels() -> None:
    mine, theirs = model(), model()
    done = Eager(update(mine, most=0.5)).run([FIRST, ODD], numbers(FIRST, ODD), 1)
    optimizer = AdamW(learning_rate=0.01).build(theirs)
    losses = [theirs.loss(batch) for batch in (FIRST, ODD)]
    (sum(loss.total for loss in losses) / (5 + 4)).backward()  # type: ignore[reportAttributeAccessIssue]
    norm = clip(theirs.parameters(), 0.5)
    optimizer.step()
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-12, atol=1e-14)
    assert done.loss.item() == pytest.approx(sum(loss.total.item() for loss in losses))
    assert done.nll.item() == pytest.approx(sum(loss.nll.item() for loss in losses))
    assert done.norm.item() == pytest.approx(norm.item())
    assert all(p.grad is None for p in mine.parameters())


def test_the_moving_average_keeps_what_it_is_told_to() -> None:
    made = model()
    step = update(made, ema=True)
    before = weights(made).clone()
    Eager(step).run([FIRST], numbers(FIRST, kept=0.75), 1)
    assert step.ema is not None
    average = torch.cat([step.ema[name].flatten() for name, _ in made.named_parameters()])
    torch.testing.assert_close(average, 0.75 * before + 0.25 * weights(made))


def test_the_seed_of_a_step_is_all_that_is_random_in_it() -> None:
    one, two, other = (model(dropout=0.5) for _ in range(3))
    for made, seed in ((one, 7), (two, 7), (other, 8)):
        torch.rand(3)
        Eager(update(made)).run([FIRST], numbers(FIRST), seed)
    assert torch.equal(weights(one), weights(two))
    assert not torch.equal(weights(one), weights(other))


def failing(after: int) -> Callable[..., Any]:
    """A torch.compile whose function fails at a call, half-way through: gradients are there already."""

    def compile_(loss: Callable[[Batch], Any], **_: Any) -> Callable[[Batch], Any]:
        calls = 0

        def run(batch: Batch) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                loss(batch).total.backward()
                raise RuntimeError("no compiler here\nand a long story")
            return loss(batch)

        return run

    return compile_


def test_a_failed_compilation_is_told_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", failing(after=1))
    mine, theirs, told = model(dropout=0.2), model(dropout=0.2), Told()
    compiled, eager = Compiled(update(mine), True, told), Eager(update(theirs))
    for seed, batch in enumerate([FIRST, SECOND, FIRST, SECOND]):
        compiled.run([batch], numbers(batch), seed)
        eager.run([batch], numbers(batch), seed)
    assert torch.equal(weights(mine), weights(theirs))
    assert told == [{"program": "eager", "why": "compiling failed: RuntimeError: no compiler here"}]


def test_an_error_of_the_step_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda loss, **_: loss)
    broken = Compiled(replace(update(model()), loss=lambda _: 1 / 0), False, Told())
    broken.compiled = Eager(broken.eager.update)
    with pytest.raises(ZeroDivisionError):
        broken.run([FIRST], numbers(FIRST), 1)


def test_what_is_compiled_is_kept_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "compile", lambda loss, **_: loss)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    update(model()).compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "regard-compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    update(model()).compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


def test_only_the_common_shape_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Batch] = []

    def compile_(loss: Callable[[Batch], Any], dynamic: bool | None, **_: Any) -> Callable[[Batch], Any]:
        assert dynamic is False
        return lambda batch: (seen.append(batch), loss(batch))[1]

    monkeypatch.setattr(torch, "compile", compile_)
    compiled = Compiled(update(model()), True, Told())
    for batch in (ODD, FIRST, SECOND, ODD, FIRST):
        compiled.run([batch], numbers(batch), 1)
    assert [id(batch) for batch in seen] == [id(SECOND), id(FIRST)]


class Stream:
    """A stream where there is no GPU."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def wait_stream(self, other: "Stream") -> None:
        """There is nothing to wait for."""


class Graph:
    """Stands for a captured step where there is no GPU: what was asked for is done when it is replayed."""

    made: ClassVar[list["Graph"]] = []

    def __init__(self, step: Callable[[], object]) -> None:
        self.step, self.replays = step, 0
        type(self).made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self.step()


def asked(step: Callable[[], object], stream: Stream) -> Graph:
    """A capture runs nothing, but its results have a place."""
    cells = inspect.unwrap(step).__closure__ or ()
    (owner,) = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Captured)]
    owner.done = torch.zeros(3, dtype=torch.float64)

    def run() -> None:
        held = owner.done
        step()
        assert held is not None
        held.copy_(owner.done)  # type: ignore[reportArgumentType]
        owner.done = held

    assert stream is owner.stream
    return Graph(run)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(program, "pinned", torch.tensor)
    monkeypatch.setattr(program.graphs, "capture", asked)
    monkeypatch.setattr(program.graphs, "watched", lambda step: (step(), None))
    monkeypatch.setattr(torch, "compile", lambda loss, **_: loss)
    return Graph.made


def run(of: StepExecutor, batches: Sequence[Sequence[Batch]], kept: float = 0.5) -> list[Done]:
    return [of.run(some, numbers(*some, kept=kept), seed) for seed, some in enumerate(batches)]


@pytest.mark.parametrize("each", [1, 2])
def test_a_captured_step_is_an_eager_one(graphs: list[Graph], each: int) -> None:
    """With dropout and a moving average; over shapes that come and go; with several batches a step."""
    mine, theirs = (update(model(dropout=0.2), ema=True) for _ in range(2))
    batches = [[FIRST, SECOND][:each], [SECOND, ODD][:each]] * 6 + [[ODD] * each, [FIRST, FIRST][:each]]
    told = Told()
    found, expected = run(Captured(mine, told), batches), run(Eager(theirs), batches)
    torch.testing.assert_close(weights(mine.model), weights(theirs.model), rtol=1e-6, atol=1e-9)
    assert mine.ema is not None
    assert theirs.ema is not None
    for name in mine.ema:
        torch.testing.assert_close(mine.ema[name], theirs.ema[name], rtol=1e-6, atol=1e-8)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.stack([*one]), torch.stack([*other]), rtol=1e-6, atol=1e-9)
    assert told.programs == ["graph"]
    (graph,) = graphs
    alike = len(batches) - 1 if each == 1 else 7  # of the shape that was met again first
    assert graph.replays == alike - 1 - program.WARM


def test_a_step_that_waits_is_never_captured(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.graphs, "watched", lambda step: (step(), "it asks the host"))
    mine, theirs, told = update(model()), update(model()), Told()
    run(Quickest(mine, told, lambda _: 1.0, None), [[FIRST]] * 8)
    run(Eager(theirs), [[FIRST]] * 8)
    assert graphs == []
    assert torch.equal(weights(mine.model), weights(theirs.model))
    assert told == [{"program": "eager", "why": "this model cannot be captured: it asks the host"}]


def test_a_capture_that_fails_is_done_without(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: Callable[[], object], stream: Stream) -> Graph:
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(program.graphs, "capture", fails)
    mine, theirs, told = update(model()), update(model()), Told()
    run(Quickest(mine, told, lambda _: 1.0, None), [[FIRST]] * 8)
    run(Eager(theirs), [[FIRST]] * 8)
    assert graphs == []
    assert torch.equal(weights(mine.model), weights(theirs.model))
    assert told.programs == ["eager"]
    assert "not permitted" in told[0]["why"]


@pytest.mark.parametrize(("left", "compiles"), [(190.0, False), (210.0, True)])
def test_compiling_waits_until_it_is_sure_to_pay(graphs: list[Graph], left: float, compiles: bool) -> None:
    told, before = Told(), 1 + program.WARM + program.TIMED
    quickest = Quickest(update(model()), told, lambda _: left, None)
    run(quickest, [[FIRST]] * (before + 8))
    assert told.programs == ["graph", *(["compiling", "compiled graph"] if compiles else [])]
    assert [graph.replays for graph in graphs] == (
        [1 + program.TIMED, 7 - program.WARM] if compiles else [program.TIMED + 8]
    )
    assert (quickest.plain.graph is None) == compiles  # whose memory is given back


def test_never_is_never_and_now_is_now(graphs: list[Graph]) -> None:
    never, now = Told(), Told()
    for told, compiles in ((never, False), (now, True)):
        run(Quickest(update(model()), told, lambda _: 1e9, compiles), [[FIRST]] * 10)
    assert never.programs == ["graph"]
    assert now.programs == ["compiling", "compiled graph"]
    assert [graph.replays for graph in graphs] == [9 - program.WARM] * 2


def test_odd_batches_are_not_compiled(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Batch] = []

    def compile_(loss: Callable[[Batch], Any], dynamic: bool | None, **_: Any) -> Callable[[Batch], Any]:
        assert dynamic is False
        return lambda batch: (seen.append(batch), loss(batch))[1]

    monkeypatch.setattr(torch, "compile", compile_)
    run(Quickest(update(model()), Told(), lambda _: 1.0, True), [[FIRST], [ODD], [SECOND], [ODD], [FIRST], [ODD]])
    assert [batch.target.shape for batch in seen] == [FIRST.target.shape] * 2
    assert graphs == []


def test_what_fails_to_compile_goes_on_as_a_plain_graph(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", failing(after=2))
    mine, theirs, told = update(model()), update(model()), Told()
    run(Quickest(mine, told, lambda _: 1.0, True), [[FIRST]] * 9)
    run(Eager(theirs), [[FIRST]] * 9)
    torch.testing.assert_close(weights(mine.model), weights(theirs.model), rtol=1e-6, atol=1e-9)
    assert told.programs == ["compiling", "graph", "graph"]
    assert "no compiler here" in told[1]["why"]
    assert [graph.replays for graph in graphs] == [9 - 1 - 2 - program.WARM]


def test_what_stands_in_the_way_of_a_graph() -> None:
    step = update(model())
    assert obstacle(step, True) is None
    assert "many shapes" in str(obstacle(step, False))
    assert "float16" in str(obstacle(replace(step, scaler=torch.amp.GradScaler("cpu", enabled=True)), True))
    other = AdamW(learning_rate=0.1).build(step.model)
    other.parts["sgd"] = torch.optim.SGD(step.model.parameters(), lr=0.1)
    assert "optimizer" in str(obstacle(replace(step, optimizer=other), True))


def test_a_cpu_runs_eagerly_unless_compiling_is_asked_for() -> None:
    told = Told()
    assert isinstance(choose(update(model()), True, None, lambda _: 1e9, told), Eager)
    assert isinstance(choose(update(model()), True, False, lambda _: 1e9, told), Eager)
    assert isinstance(choose(update(model()), True, True, lambda _: 1e9, told), Compiled)
    assert told == []


def test_batches_that_are_alike_take_each_others_place() -> None:
    assert FIRST.alike(SECOND)
    assert not FIRST.alike(ODD)
    assert not FIRST.alike(replace(SECOND, weights=torch.ones(2, 3)))
    assert not FIRST.alike(replace(SECOND, segments=2))
    held = Batch(*(t.clone() for t in (FIRST.target, FIRST.labels, FIRST.target_seg, FIRST.source, FIRST.source_seg)))  # type: ignore[reportOptionalMemberAccess]
    places = [held.target.data_ptr(), held.source.data_ptr()]  # type: ignore[reportOptionalMemberAccess]
    held.fill(SECOND)
    assert torch.equal(held.target, SECOND.target)
    assert torch.equal(held.source, SECOND.source)  # type: ignore[reportArgumentType]
    assert [held.target.data_ptr(), held.source.data_ptr()] == places  # type: ignore[reportOptionalMemberAccess]


def test_utilisation_counts_three_forward_passes() -> None:
    assert mfu.utilisation(1e9, 1e5, 1e15) == pytest.approx(0.3)
    assert mfu.peak(CPU, torch.bfloat16) is None


@pytest.mark.parametrize("overflow", [math.inf, math.nan])
def test_where_one_gradient_overflows_no_part_of_an_optimizer_steps(overflow: float) -> None:
    """Clipping divides all gradients by one norm; a part that did not overflow would step with what that leaves."""
    made = model()
    table, *rest = made.parameters()
    parts: dict[str, torch.optim.Optimizer] = {
        "table": torch.optim.AdamW([table], lr=0.01),
        "rest": torch.optim.AdamW(rest, lr=0.01),
    }
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = Update(made, made.loss, Optimizer(made, parts), 1.0, CPU, None, scaler, None)
    step([FIRST], numbers(FIRST))
    before = weights(made)
    hook = table.register_hook(lambda gradient: gradient.fill_(overflow))
    norm = step([FIRST], numbers(FIRST))[-1]
    assert not norm.isfinite()
    assert step.scaler.get_scale() == 4.0
    assert torch.equal(weights(made), before)
    hook.remove()
    step([FIRST], numbers(FIRST))
    assert not torch.equal(weights(made), before)
    assert weights(made).isfinite().all()


# -- memory that does not hold a step


def lack(why: str = "", tokens: int | None = 4_000_000, accumulate: int = 1, longest: int = 50) -> Lack:
    return Lack(why, CPU, tokens, accumulate, longest)


def test_half_a_batch_is_proposed_where_nothing_is_known() -> None:
    assert lack(tokens=4096).fitting() == 2000
    assert lack(tokens=100).fitting() == 50
    assert lack(tokens=90).fitting() == 50  # the longest example


def test_less_is_proposed_where_far_more_memory_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lack, "_there", lambda _: 10.0 * 2**30)
    assert lack("CUDA out of memory. Tried to allocate 80.00 GiB. GPU 0").fitting() == 400_000
    assert lack("CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0").fitting() == 2_000_000
    bytes_wanted = 80 * 2**30
    assert lack(f"can't allocate memory: you tried to allocate {bytes_wanted} bytes. Error 12").fitting() == 400_000


def test_the_sentence_names_budget_option_and_what_is_left() -> None:
    said = lack(tokens=4000, accumulate=3).sentence(Path("runs/one"), None)
    assert "a batch of 4,000 tokens is too much; try --set data.batching.tokens=2000" in said
    assert "--set train.accumulate=6" in said
    assert "runs/one" not in said
    said = lack(tokens=4000).sentence(Path("runs/one"), 7)
    assert "the checkpoint of step 7 is intact: regard train --from runs/one" in said
    assert "regard resume runs/one with this one where there is more memory" in said
    assert "lower data.max_len, or choose a smaller model" in lack(tokens=60, longest=60).sentence(
        Path("runs/one"), None
    )
    assert "\n" not in said


def test_a_failed_compilation_frees_its_memory_before_the_step_is_run_again() -> None:
    made, held = model(), []

    class Big:
        """Stands for a tensor of the step that failed."""

    def fail(*_: Any) -> Done:
        big = Big()
        held.append(weakref.ref(big))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def check(*_: Any) -> Done:
        gc.collect()
        assert held[0]() is None
        return Done(torch.ones(()), torch.ones(()), torch.ones(()))

    tried = Compiled(update(made), one_shape=False, tell=lambda *_, **__: None)
    assert tried.compiled is not None
    tried.compiled.run, tried.eager.run = fail, check  # type: ignore[method-assign]
    tried.run([FIRST], numbers(FIRST), 1)
