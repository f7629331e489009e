"""Step executors: run a training step eagerly, compiled, or as one CUDA graph, with the same numerical result.

The speed of a small model in eager mode is limited by kernel launches: a step of a few hundred kernels takes as long as
the host needs to launch them. If a step is captured as a CUDA graph, the whole step (losses, gradients, clipping,
optimizer, moving average) is one launch. A graph requires that all batches have one shape, and that every scalar that
changes from step to step is in a tensor.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.batch import Batch
from regard.errors import RegardError, lacks_memory
from regard.fast import graphs, operators
from regard.models.base import Model
from regard.models.loss import Loss
from regard.training.activation_checkpointing import checkpoints_blocks
from regard.training.optim import Optimizer, clip
from regard.training.parallel.gradients import Gradients, local

RECENT = 8  # number of recent batch shapes to remember until one of them occurs again
TIMED = 30  # replays that are timed before deciding whether to compile
# Share of the step time that compiling saves, and seconds to compile. On an H200, compiling the base model takes 36 s
# and saves a fifth; compiling the big model takes 57 s.
GAIN, COST = 0.2, 40.0

Emit = Callable[..., None]  # (event, **values)
TimeLeft = Callable[[float], float]  # (duration of a step in seconds) -> remaining training time in seconds


class UpdateMemoryError(MemoryError):
    """Error when memory runs out after the gradient is computed. The weights may have changed already."""


class StepScalars(NamedTuple):
    """The scalar inputs of a training step, which change from step to step. On CUDA, they are elements of a tensor."""

    labels: float | Tensor  # number of labels in all batches
    ema_decay: float | Tensor
    shares: Sequence[float | Tensor]  # for each batch, its share of the labels

    def flat(self) -> tuple[float | Tensor, ...]:
        return (self.labels, self.ema_decay, *self.shares)

    @classmethod
    def of(cls, tensor: Tensor) -> "StepScalars":
        """Return the scalars stored in a tensor, in the order of `flat`."""
        labels, ema_decay, *shares = tensor.unbind()
        return cls(labels, ema_decay, shares)


class StepResult(NamedTuple):
    """The result of a step: loss and negative log-likelihood, summed over labels, and gradient norm before clipping."""

    loss: Tensor
    nll: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Update:
    """A training step: a function of the batches and `StepScalars` that updates the weights once."""

    model: Model
    loss: Callable[[Batch], Loss]
    optimizer: Optimizer
    clip: float
    device: torch.device
    dtype: torch.dtype | None
    scaler: torch.amp.GradScaler
    ema: Mapping[str, Tensor] | None
    gradients: Gradients = Gradients()  # how several processes share a step

    def compiled(self, dynamic: bool | None = False) -> "Update":
        """Return the same update with its loss compiled by torch.compile."""
        operators.introduce()
        return replace(self, loss=torch.compile(self.loss, dynamic=dynamic, options=compile_options()))

    def __call__(self, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> Tensor:
        """Update the weights by the gradient of the mean loss over all labels; return `StepResult` as one tensor.

        `seed` is the seed of the step. The random numbers of a batch depend on it and on the number of the batch. If
        the loss or the gradient is not finite, weights, optimizer state and moving average do not change.
        """
        losses = []
        for number, batch in enumerate(batches):
            torch.manual_seed(self.seed(seed, number))
            losses.append(self.backward(batch, scalars, number))
        return self.finish(losses, scalars)

    def seed(self, step: int, number: int) -> int:
        """Return the seed for the batch `number` of this process, in a step with the seed `step`."""
        return batch_seed(step, self.gradients.number(number))

    def backward(self, batch: Batch, scalars: StepScalars, number: int) -> Loss:
        """Add the gradient of a batch, which is number `number` of this process in its step; return its loss."""
        with self.gradients.sharing(number == len(scalars.shares) - 1):
            with nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype):
                loss = self.gradients.loss(self.loss, batch)
            objective = loss.total / scalars.labels + loss.aux * scalars.shares[number]
            self.scaler.scale(objective * self.gradients.scale if self.gradients.scale != 1 else objective).backward()
        return Loss(*(value.detach() for value in loss))

    def finish(self, losses: Sequence[Loss], scalars: StepScalars) -> Tensor:
        """Update the weights and their moving average by the gradients; return `StepResult` as one tensor."""
        for part in self.optimizer.parts.values():
            self.scaler.unscale_(part)
        sums = [torch.stack(values).sum() for values in zip(*((loss.total, loss.nll) for loss in losses), strict=True)]
        total, nll = self.gradients.summed(torch.stack(sums)).unbind()
        try:
            norm = clip(self.model.parameters(), self.clip)
            self._change_weights(norm.isfinite() & total.isfinite(), scalars.ema_decay)
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            raise UpdateMemoryError(str(error)) from None
        return torch.stack([total, nll, norm.detach().to(total.dtype)])

    def _change_weights(self, finite: Tensor, decay: float | Tensor) -> None:
        """Update weights and moving average, unless the loss or the gradient is not finite.

        A captured step must not wait for the device, so the optimizer itself skips the update there.
        """
        changed = True
        if self.scaler.is_enabled():
            changed = bool(finite)
            if changed:  # after an overflow, clipping has made all gradients invalid
                for part in self.optimizer.parts.values():
                    self.scaler.step(part)
            self.scaler.update()
        elif self.device.type == "cuda" and self.optimizer.capturable and self.gradients.eager is None:
            self.optimizer.step_if_finite(1 - finite.float())
            decay = torch.where(finite, decay, 1.0)
        else:
            changed = bool(finite)
            if changed:
                self.optimizer.step()
        self.optimizer.zero()
        if self.ema is not None and changed:
            self._update_average(self.ema, decay)

    @torch.no_grad()
    def _update_average(self, ema: Mapping[str, Tensor], decay: float | Tensor) -> None:
        weights = {name: local(parameter) for name, parameter in self.model.named_parameters()}
        averages = [local(ema[name]) for name in weights]
        if self.device.type == "cuda":  # a few kernels instead of one per parameter
            share = 1 - decay if isinstance(decay, Tensor) else torch.tensor(1 - decay, device=self.device)
            changes = torch._foreach_sub(list(weights.values()), averages)  # type: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(changes, share)  # type: ignore[reportPrivateImportUsage]
            torch._foreach_add_(averages, changes)  # type: ignore[reportPrivateImportUsage]
        else:
            for average, weight in zip(averages, weights.values(), strict=True):
                average.lerp_(weight, 1 - decay)


def compile_options() -> dict[str, Any]:
    """Return options for torch.compile: no mixed-order reductions, if the installed version has this option.

    On an H200, one kernel for both the row and the column gradients of a norm takes twice as long as two kernels (199
    and 100 us for 32,768 rows of width 512).
    """
    option = "triton.mix_order_reduction"
    return {option: False} if option in torch._inductor.list_options() else {}


class StepExecutor:
    """Abstract base class of step executors, which run training steps."""

    @abstractmethod
    def run(self, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> StepResult:
        """Run one training step on `batches`, with random numbers seeded with `seed`."""

    def release(self) -> None:
        """Free memory that the executor keeps between steps. Default: it keeps none."""


class Eager(StepExecutor):
    """Runs every training step eagerly, operation by operation."""

    def __init__(self, update: Update) -> None:
        self.update = update

    def run(self, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> StepResult:
        device = self.update.device
        if device.type != "cpu":
            batches = [batch.to(device, non_blocking=True) for batch in batches]
        return StepResult(*self.update(batches, on_device(scalars, device), seed).unbind())


def batch_seed(seed: int, number: int) -> int:
    """Return the seed of the batch `number` in a step with the seed `seed`, which is also the seed of batch 0."""
    if number == 0:
        return seed
    return int(np.random.SeedSequence([seed % 2**64, number]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def on_device(scalars: StepScalars, device: torch.device) -> StepScalars:
    """Return the scalars, on CUDA as elements of a tensor, so that they are rounded as in a captured step."""
    return StepScalars.of(pinned(scalars.flat()).to(device, non_blocking=True)) if device.type == "cuda" else scalars


def pinned(numbers: Sequence[float | Tensor]) -> Tensor:
    """Return the numbers in pinned memory, so that the host does not wait while they are copied to a GPU."""
    return torch.tensor(numbers, dtype=torch.float32).pin_memory()


class Compiled(StepExecutor):
    """Compiles the loss with torch.compile. If compiling fails, emits an event and runs all further steps eagerly.

    If memory runs out in a compiled step, the error is raised, and further steps run compiled.
    """

    def __init__(self, update: Update, one_shape: bool, emit: Emit) -> None:
        """If `one_shape` is true, only batches of the most common shape run compiled, and all others run eagerly."""
        self.eager, self.emit = Eager(update), emit
        self.compiled: Eager | None = Eager(update.compiled(dynamic=False if one_shape else None))
        self.common = CommonShape() if one_shape else None

    def run(self, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> StepResult:
        if self.compiled is None or (self.common is not None and not self.common.fits(batches)):
            return self.eager.run(batches, scalars, seed)
        try:
            return self.compiled.run(batches, scalars, seed)
        except UpdateMemoryError:
            raise
        except Exception as error:  # an error of the step itself is raised again when it runs eagerly
            if lacks_memory(error):
                raise
            why = summary(error)
        # After the handler, because the error keeps all tensors of the failed step in memory.
        self.compiled = None
        self.eager.update.optimizer.zero()
        self.emit("executor", executor="eager", why=f"compiling failed: {why}")
        return self.eager.run(batches, scalars, seed)


class CommonShape:
    """The most common batch shape, which is assumed to be the first shape that occurs twice."""

    def __init__(self) -> None:
        self.recent: list[Sequence[Batch]] = []
        self.batches: Sequence[Batch] | None = None

    def fits(self, batches: Sequence[Batch]) -> bool:
        """Return whether the batches have the most common shape. Before it is known, return False."""
        if self.batches is not None:
            return same_shapes(batches, self.batches)
        self.batches = next((earlier for earlier in self.recent if same_shapes(batches, earlier)), None)
        self.recent = [] if self.batches is not None else [batches, *self.recent][:RECENT]
        return self.batches is not None


class Captured(StepExecutor):
    """Runs a whole training step as one CUDA graph, which is captured after a few eager steps.

    If a step has several batches, each batch has a graph of its own, because the random numbers of a graph have one
    seed. The last graph also updates the weights.
    """

    def __init__(
        self,
        update: Update,
        emit: Emit,
        name: str = "graph",
        odd: Update | None = None,
        common: CommonShape | None = None,
    ) -> None:
        """`odd` is run eagerly for batches of other shapes than the captured shape. If it is None, `update` is run."""
        self.eager, self.odd = Eager(update), Eager(odd or update)
        self.emit, self.name, self.common = emit, name, common or CommonShape()
        self.stream = torch.cuda.Stream(update.device)
        self.warm, self.began = 0, time.perf_counter()
        self.graph: torch.cuda.CUDAGraph | None = None  # of the last batch and the update of the weights
        self.earlier: list[torch.cuda.CUDAGraph] = []  # of the batches before it
        self.batches: list[Batch] = []
        self.scalars: Tensor | None = None
        self.result: Tensor | None = None
        self.failed: str | None = None

    def run(self, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> StepResult:
        if self.failed is not None or not self.common.fits(batches):
            return self.odd.run(batches, scalars, seed)
        if self.graph is None and self.warm < self.eager.update.gradients.warm:
            return self._warm_up(batches, scalars, seed)
        if self.graph is None and not self._capture(batches, scalars):
            return self.odd.run(batches, scalars, seed)
        assert self.graph is not None
        assert self.scalars is not None
        assert self.result is not None
        for static, batch in zip(self.batches, batches, strict=True):
            static.fill(batch)
        self.scalars.copy_(pinned(scalars.flat()), non_blocking=True)
        for number, graph in enumerate([*self.earlier, self.graph]):
            torch.manual_seed(self.eager.update.seed(seed, number))
            graph.replay()
        return StepResult(*self.result.clone().unbind())  # every replay overwrites the same result tensor

    def _warm_up(self, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> StepResult:
        """Run an eager step on a side stream, as capturing requires; detect synchronisations in the last of these."""
        current = torch.cuda.current_stream(self.stream.device)
        self.warm += 1
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            if self.warm < self.eager.update.gradients.warm:
                result = self.eager.run(batches, scalars, seed)
            else:
                result, self.failed = graphs.watched(lambda: self.eager.run(batches, scalars, seed))
        current.wait_stream(self.stream)
        return result

    def _capture(self, batches: Sequence[Batch], scalars: StepScalars) -> bool:
        """Capture a step as CUDA graphs without running it; if that fails, store the reason and return False."""
        device = self.stream.device
        self.batches = [batch.copy_to(device) for batch in batches]
        self.scalars = torch.tensor(scalars.flat(), dtype=torch.float32, device=device)
        losses: dict[int, Loss] = {}

        def step(number: int) -> None:
            assert self.scalars is not None
            update, inputs = self.eager.update, StepScalars.of(self.scalars)
            losses[number] = update.backward(self.batches[number], inputs, number)
            if number == len(self.batches) - 1:
                self.result = update.finish([losses[each] for each in range(len(losses))], inputs)

        try:
            pool = None  # one memory pool for all graphs, because each of them reads what the ones before it computed
            for number in range(len(batches)):
                graph = graphs.capture(lambda number=number: step(number), self.stream, pool)
                pool = graph.pool()
                self.earlier.append(graph)
        except Exception as error:
            self.release()
            self.failed = summary(error)
            self.eager.update.optimizer.zero()
            torch.cuda.synchronize(device)
            return False
        self.graph = self.earlier.pop()
        self.emit("executor", executor=self.name, seconds=time.perf_counter() - self.began)
        return True

    def release(self) -> None:
        """Free the memory of the graph; the next call of `run` captures it again."""
        self.graph, self.batches, self.scalars, self.result = None, [], None, None
        self.earlier = []


class Quickest(StepExecutor):
    """Runs steps as a CUDA graph, and compiles them later if compiling saves time. On failure, steps run more slowly.

    Compiling takes up to a minute, so it must save more than that over all remaining steps.
    """

    def __init__(self, update: Update, emit: Emit, time_left: TimeLeft, compiles: bool | None) -> None:
        """Begin with a CUDA graph.

        If `compiles` is True, the step is compiled at once. If it is False, the step is never compiled. If it is None,
        the step is compiled as soon as that should shorten training.
        """
        self.update, self.emit, self.time_left = update, emit, time_left
        self.compiles = compiles
        self.plain = Captured(update, emit)
        self.compiled: Captured | None = None
        self.replays, self.seconds = 0, 0.0
        if compiles:
            self._compile("as requested")

    def run(self, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> StepResult:
        if self.compiled is not None:
            try:
                result = self.compiled.run(batches, scalars, seed)
            except UpdateMemoryError:
                raise
            except Exception as error:
                if not lacks_memory(error):
                    self._fall_back(f"compiling failed: {summary(error)}")
                elif self.plain.graph is not None and self.plain.common.fits(batches):  # which fits into memory
                    self._fall_back(f"memory ran out in the compiled step: {summary(error)}")
                else:
                    raise
            else:
                if self.compiled.failed is not None:
                    self._fall_back(f"the compiled step cannot be captured: {self.compiled.failed}")
                elif self.compiled.graph is not None and self.plain.graph is not None:
                    self.plain.release()
                return result
        failed_before = self.plain.failed is not None
        if self.compiles is None and self.plain.graph is not None:
            return self._timed(batches, scalars, seed)
        result = self.plain.run(batches, scalars, seed)
        if self.plain.failed is not None and not failed_before:
            self.emit("executor", executor="eager", why=f"this model cannot be captured: {self.plain.failed}")
        return result

    def release(self) -> None:
        self.plain.release()
        if self.compiled is not None:
            self.compiled.release()

    def _timed(self, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> StepResult:
        """Replay the graph and measure how long it takes; after `TIMED` replays, compile if that saves time."""
        torch.cuda.synchronize(self.update.device)
        began = time.perf_counter()
        result = self.plain.run(batches, scalars, seed)
        torch.cuda.synchronize(self.update.device)
        self.seconds += time.perf_counter() - began
        self.replays += 1
        if self.replays == TIMED:
            step = self.seconds / TIMED
            left = self.time_left(step)
            self.compiles = left * GAIN > COST
            if self.compiles:
                self._compile(f"{left:.0f} s of steps are left, of {1000 * step:.1f} ms each")
        return result

    def _compile(self, why: str) -> None:
        self.emit("executor", executor="compiling", why=why)
        self.compiled = Captured(self.update.compiled(), self.emit, "compiled graph", self.update, self.plain.common)

    def _fall_back(self, why: str) -> None:
        self.compiled, self.compiles = None, False
        self.update.optimizer.zero()
        self.emit("executor", executor="graph", why=why)


def same_shapes(batches: Sequence[Batch], others: Sequence[Batch]) -> bool:
    """Return whether all shapes are equal, so that a step captured or compiled for `others` can run `batches`."""
    return len(batches) == len(others) and all(a.alike(b) for a, b in zip(batches, others, strict=True))


def capture_obstacle(update: Update, one_shape: bool) -> str | None:
    """Return why training steps cannot be captured as a CUDA graph, or None if no obstacle is known."""
    if not one_shape:
        return "the batches have many shapes (data.batching)"
    if update.gradients.unused:
        return "some weights receive no gradient, which the processes exchange at every step"
    if update.scaler.is_enabled():
        return "float16 scales the loss on the host (train.precision)"
    if not update.optimizer.capturable:
        return "the optimizer waits for the device at every step (train.optimizer)"
    if checkpoints_blocks(update.model):
        return "a graph cannot draw the random numbers of dropout a second time (train.checkpoint_layers)"
    return None


def choose_executor(
    update: Update, one_shape: bool, compiles: bool | None, time_left: TimeLeft, emit: Emit
) -> StepExecutor:
    """Return the fastest step executor. `compiles` is the setting `train.compile`; None compiles if it saves time."""
    if update.gradients.eager is not None:
        emit("executor", executor="eager", why=update.gradients.eager)
        return Eager(update)
    if update.device.type == "cuda":
        why = capture_obstacle(update, one_shape)
        if why is None:
            return Quickest(update, emit, time_left, compiles)
        emit("executor", executor="compiled" if compiles else "eager", why=f"no CUDA graph: {why}")
    return Compiled(update, one_shape, emit) if compiles else Eager(update)


def summary(error: Exception) -> str:
    """Return the first line of an error message. It is preceded by the type of the error, except for a RegardError."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else "no reason given"
    return first if isinstance(error, RegardError) else f"{type(error).__name__}: {first[:200]}"


def description(event: Mapping[str, Any]) -> str:
    """Return a sentence that describes an "executor" event."""
    names = {
        "eager": "steps run eagerly, one operation after the other",
        "compiling": "compiling the step",
        "compiled": "the loss is compiled",
        "graph": "a step is one CUDA graph",
        "compiled graph": "a step is one compiled CUDA graph",
    }
    took = f" (ready after {event['seconds']:.0f} s)" if "seconds" in event else ""
    return f"{names[event['executor']]}{took}{': ' + event['why'] if event.get('why') else ''}"
