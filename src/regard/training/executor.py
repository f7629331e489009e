"""Programs: how a step of training is run. Eagerly, compiled, or as one CUDA graph; what is learned is the same.

A small model in eager mode is bound by launches: a step of a few hundred kernels takes as long as the host needs to ask
for them. Captured as a CUDA graph, all of it (losses, gradients, clipping, optimizer, moving average) is asked for
once. That needs batches of one shape, and every number that changes from step to step in a tensor.
"""

import os
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.batch import Batch
from regard.data import cache
from regard.errors import RegardError
from regard.fast import graphs, operators
from regard.models.base import Model
from regard.models.loss import Loss
from regard.training.optim import Optimizer, clip

RECENT = 8  # shapes that are remembered until one is met again
WARM = 3  # steps before a capture: the optimizer's state, the libraries' workspaces and all lazy work come to be
TIMED = 30  # replays whose time decides whether compiling pays
GAIN, COST = 0.2, 40.0  # on an H200 compiling saved a fifth of a captured step of base, after 36 s (big: 57 s)

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # where torch.compile keeps what it makes

Numbers = Sequence[float]
Tell = Callable[..., None]
Left = Callable[[float], float]  # from the seconds of a step to the seconds of all steps that are left


class Done(NamedTuple):
    """What a step leaves to be noted: sums over its labels, and the norm of the gradient before clipping."""

    loss: Tensor
    nll: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Update:
    """One change of the weights, as a function of batches and of the numbers that change from step to step."""

    model: Model
    loss: Callable[[Batch], Loss]
    optimizer: Optimizer
    clip: float
    device: torch.device
    dtype: torch.dtype | None
    scaler: torch.amp.GradScaler
    ema: Mapping[str, Tensor] | None

    def compiled(self, dynamic: bool | None = False) -> "Update":
        """The same with its loss compiled by torch.compile, which keeps what it makes for the next run."""
        given = os.environ.get(INDUCTOR, "")
        own = not given or Path(given).name.startswith("torchinductor_")  # torch's choice, which a restart may lose
        if own and (kept := cache.compiled()) is not None:
            os.environ[INDUCTOR] = str(kept)
        operators.introduce()
        return replace(self, loss=torch.compile(self.loss, dynamic=dynamic, options=options()))

    def __call__(self, batches: Sequence[Batch], numbers: Numbers | Tensor) -> Tensor:
        """Step. `numbers`: all labels of the step, the memory of the moving average, the share of each batch in them.

        The gradient is that of the mean loss over all labels. Returns the fields of `Done` as one tensor.
        """
        labels, kept, *shares = numbers
        losses = [self._backward(batch, labels, share) for batch, share in zip(batches, shares, strict=True)]
        for part in self.optimizer.parts.values():
            self.scaler.unscale_(part)
        norm = clip(self.model.parameters(), self.clip)
        self._change(norm)
        if self.ema is not None:
            self._average(self.ema, kept)
        total = torch.stack([loss.total.detach() for loss in losses]).sum()
        nll = torch.stack([loss.nll.detach() for loss in losses]).sum()
        return torch.stack([total, nll, norm.detach().to(total.dtype)])

    def _backward(self, batch: Batch, labels: float | Tensor, share: float | Tensor) -> Loss:
        cast = nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)
        with cast:
            loss = self.loss(batch)
        self.scaler.scale(loss.total / labels + loss.aux * share).backward()
        return loss

    def _change(self, norm: Tensor) -> None:
        """Step the optimizer, unless a float16 gradient overflowed: then none of its parts, for all were clipped."""
        if self.scaler.is_enabled():
            if bool(norm.isfinite()):
                for part in self.optimizer.parts.values():
                    self.scaler.step(part)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero()

    @torch.no_grad()
    def _average(self, ema: Mapping[str, Tensor], kept: float | Tensor) -> None:
        weights = dict(self.model.named_parameters())
        averages = [ema[name] for name in weights]
        if self.device.type == "cuda":  # a few kernels instead of one for each of them
            share = 1 - kept if isinstance(kept, Tensor) else torch.tensor(1 - kept, device=self.device)
            changes = torch._foreach_sub(list(weights.values()), averages)  # type: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(changes, share)  # type: ignore[reportPrivateImportUsage]
            torch._foreach_add_(averages, changes)  # type: ignore[reportPrivateImportUsage]
        else:
            for average, weight in zip(averages, weights.values(), strict=True):
                average.lerp_(weight, 1 - kept)


def options() -> dict[str, Any]:
    """What torch.compile is told, where its version knows it.

    One kernel for a norm's gradients of rows and of columns takes twice as long on an H200 as two (199 and 100 us for
    32,768 rows of 512).
    """
    wanted = {"triton.mix_order_reduction": False}
    known = torch._inductor.list_options()
    return {name: value for name, value in wanted.items() if name in known}


class StepExecutor:
    """Abstract: runs the steps of a training."""

    @abstractmethod
    def run(self, batches: Sequence[Batch], numbers: Numbers, seed: int) -> Done:
        """One step; what is random in it is drawn from `seed`."""


class Eager(StepExecutor):
    """Operation by operation."""

    def __init__(self, update: Update) -> None:
        self.update = update

    def run(self, batches: Sequence[Batch], numbers: Numbers, seed: int) -> Done:
        device = self.update.device
        if device.type != "cpu":
            batches = [batch.to(device, non_blocking=True) for batch in batches]
        torch.manual_seed(seed)
        return Done(*self.update(batches, placed(numbers, device)).unbind())


def placed(numbers: Numbers, device: torch.device) -> Numbers | Tensor:
    """The numbers of a step where it runs: on CUDA in a tensor, so that a captured step rounds as an eager one does."""
    return pinned(numbers).to(device, non_blocking=True) if device.type == "cuda" else numbers


def pinned(numbers: Numbers) -> Tensor:
    """Numbers in memory from where a GPU fetches them by itself, so that nobody waits for it."""
    return torch.tensor(numbers, dtype=torch.float32).pin_memory()


class Compiled(StepExecutor):
    """The loss through torch.compile. If that fails it is said, and everything goes on eagerly."""

    def __init__(self, update: Update, one_shape: bool, tell: Tell) -> None:
        """With `one_shape`, a batch of another shape, as the last of an epoch, is not worth a compilation."""
        self.eager, self.tell = Eager(update), tell
        self.compiled: Eager | None = Eager(update.compiled(dynamic=False if one_shape else None))
        self.common = Common() if one_shape else None

    def run(self, batches: Sequence[Batch], numbers: Numbers, seed: int) -> Done:
        if self.compiled is None or (self.common is not None and not self.common.fits(batches)):
            return self.eager.run(batches, numbers, seed)
        try:
            return self.compiled.run(batches, numbers, seed)
        except Exception as error:  # what is wrong with the step itself is raised again when it runs eagerly
            why = reason(error)
        # Outside of the handler, whose error holds all that the failed step had in memory.
        self.compiled = None
        self.eager.update.optimizer.zero()
        self.tell("program", program="eager", why=f"compiling failed: {why}")
        return self.eager.run(batches, numbers, seed)


class Common:
    """The shape that batches have in common: the first that is met for the second time."""

    def __init__(self) -> None:
        self.seen: list[Sequence[Batch]] = []
        self.batches: Sequence[Batch] | None = None

    def fits(self, batches: Sequence[Batch]) -> bool:
        """Whether these have it; never true before it is known."""
        if self.batches is not None:
            return alike(batches, self.batches)
        self.batches = next((seen for seen in self.seen if alike(batches, seen)), None)
        self.seen = [] if self.batches is not None else [batches, *self.seen][:RECENT]
        return self.batches is not None


class Captured(StepExecutor):
    """A whole step as one CUDA graph, after a few that run eagerly. A batch of another shape runs in another way."""

    def __init__(
        self,
        update: Update,
        tell: Tell,
        name: str = "graph",
        odd: Update | None = None,
        common: Common | None = None,
    ) -> None:
        """`odd` runs what has another shape than the others (None: the same eagerly)."""
        self.eager, self.odd = Eager(update), Eager(odd or update)
        self.tell, self.name, self.common = tell, name, common or Common()
        self.stream = torch.cuda.Stream(update.device)
        self.warm, self.began = 0, time.perf_counter()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batches: list[Batch] = []
        self.numbers: Tensor | None = None
        self.done: Tensor | None = None
        self.failed: str | None = None

    def run(self, batches: Sequence[Batch], numbers: Numbers, seed: int) -> Done:
        if self.failed is not None or not self.common.fits(batches):
            return self.odd.run(batches, numbers, seed)
        if self.graph is None and self.warm < WARM:
            return self._warm_up(batches, numbers, seed)
        if self.graph is None and not self._capture(batches, numbers):
            return self.odd.run(batches, numbers, seed)
        assert self.graph is not None
        assert self.numbers is not None
        assert self.done is not None
        for held, batch in zip(self.batches, batches, strict=True):
            held.fill(batch)
        self.numbers.copy_(pinned(numbers), non_blocking=True)
        torch.manual_seed(seed)
        self.graph.replay()
        return Done(*self.done.clone().unbind())  # a replay writes its results to the same place every time

    def _warm_up(self, batches: Sequence[Batch], numbers: Numbers, seed: int) -> Done:
        """A step on a stream of its own, as a capture wants it; the last of them is watched."""
        here = torch.cuda.current_stream(self.stream.device)
        self.warm += 1
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            if self.warm < WARM:
                done = self.eager.run(batches, numbers, seed)
            else:
                done, waits = graphs.watched(lambda: self.eager.run(batches, numbers, seed))
                self.failed = waits
        here.wait_stream(self.stream)
        return done

    def _capture(self, batches: Sequence[Batch], numbers: Numbers) -> bool:
        """Ask for all of a step once, without running it. Says why, if that cannot be."""
        device = self.stream.device
        self.batches = [batch.copy_to(device) for batch in batches]
        self.numbers = torch.tensor(numbers, dtype=torch.float32, device=device)

        def step() -> None:
            assert self.numbers is not None
            self.done = self.eager.update(self.batches, self.numbers)

        try:
            self.graph = graphs.capture(step, self.stream)
        except Exception as error:
            self.release()
            self.failed = reason(error)
            self.eager.update.optimizer.zero()
            torch.cuda.synchronize(device)
            return False
        self.tell("program", program=self.name, seconds=time.perf_counter() - self.began)
        return True

    def release(self) -> None:
        """Give back the memory of the graph; it is captured again if it is wanted again."""
        self.graph, self.batches, self.numbers, self.done = None, [], None, None


class Quickest(StepExecutor):
    """A CUDA graph at once, and of a compiled step as soon as that is sure to pay; what fails is said and done without.

    Compiling takes its time, so a short run does without: it has to save more than it costs in the steps that are left.
    """

    def __init__(self, update: Update, tell: Tell, left: Left, compiles: bool | None) -> None:
        """`left` gives the seconds that steps of some duration still take; `compiles`: now, never, or if it pays."""
        self.update, self.tell, self.left = update, tell, left
        self.compiles = compiles
        self.plain = Captured(update, tell)
        self.compiled: Captured | None = None
        self.replays, self.spent = 0, 0.0
        if compiles:
            self._compile("as asked")

    def run(self, batches: Sequence[Batch], numbers: Numbers, seed: int) -> Done:
        if self.compiled is not None:
            try:
                done = self.compiled.run(batches, numbers, seed)
            except Exception as error:
                self._fall_back(reason(error))
            else:
                if self.compiled.failed is not None:
                    self._fall_back(self.compiled.failed)
                elif self.compiled.graph is not None and self.plain.graph is not None:
                    self.plain.release()
                return done
        known = self.plain.failed is not None
        if self.compiles is None and self.plain.graph is not None:
            return self._timed(batches, numbers, seed)
        done = self.plain.run(batches, numbers, seed)
        if self.plain.failed is not None and not known:
            self.tell("program", program="eager", why=f"this model cannot be captured: {self.plain.failed}")
        return done

    def _timed(self, batches: Sequence[Batch], numbers: Numbers, seed: int) -> Done:
        """A replay whose time counts; after some of them, compile if that pays."""
        torch.cuda.synchronize(self.update.device)
        began = time.perf_counter()
        done = self.plain.run(batches, numbers, seed)
        torch.cuda.synchronize(self.update.device)
        self.spent += time.perf_counter() - began
        self.replays += 1
        if self.replays == TIMED:
            step = self.spent / TIMED
            left = self.left(step)
            self.compiles = left * GAIN > COST
            if self.compiles:
                self._compile(f"steps of {1000 * step:.1f} ms go on for {left:.0f} s")
        return done

    def _compile(self, why: str) -> None:
        self.tell("program", program="compiling", why=why)
        self.compiled = Captured(self.update.compiled(), self.tell, "compiled graph", self.update, self.plain.common)

    def _fall_back(self, why: str) -> None:
        self.compiled, self.compiles = None, False
        self.update.optimizer.zero()
        self.tell("program", program="graph", why=f"compiling failed: {why}")


def alike(batches: Sequence[Batch], others: Sequence[Batch]) -> bool:
    """Whether what was made for the others fits these."""
    return len(batches) == len(others) and all(a.alike(b) for a, b in zip(batches, others, strict=True))


def obstacle(update: Update, one_shape: bool) -> str | None:
    """Why the steps of a training on CUDA cannot be captured; None if nothing is known to stand in the way."""
    if not one_shape:
        return "its batches have many shapes (data.batching)"
    if update.scaler.is_enabled():
        return "float16 scales its loss on the host (train.precision)"
    if not update.optimizer.capturable:
        return "its optimizer asks the host at every step (train.optimizer)"
    return None


def choose(update: Update, one_shape: bool, compiles: bool | None, left: Left, tell: Tell) -> StepExecutor:
    """The quickest program for a training. `compiles`: whether torch.compile is asked for; None: where it pays."""
    if update.device.type != "cuda":
        return Compiled(update, one_shape, tell) if compiles else Eager(update)
    why = obstacle(update, one_shape)
    if why is None:
        return Quickest(update, tell, left, compiles)
    tell("program", program="compiled" if compiles else "eager", why=f"no CUDA graph: {why}")
    return Compiled(update, one_shape, tell) if compiles else Eager(update)


@dataclass(frozen=True)
class Lack:
    """A step of training that memory does not hold, and the budget that would fit."""

    why: str  # what torch says
    device: torch.device
    tokens: int | None  # of a batch (data.batching.tokens)
    accumulate: int
    longest: int  # tokens of the longest example, which a batch must hold

    def fitting(self) -> int:
        """Tokens of a batch that should fit: at most half, less where more than twice the memory was wanted.

        What a step needs grows with its tokens. How much it would have needed is not known, only where it stopped.
        """
        needed, there = self._needed(), self._there()
        share = min(0.5, 0.8 * there / needed) if needed and there else 0.5
        tokens = int((self.tokens or 0) * share)
        unit = 10 ** max(0, len(str(tokens)) - 2)
        return max(self.longest, tokens // unit * unit)

    def _needed(self) -> float:
        """Bytes in use when it stopped, and those that were asked for then."""
        found = re.search(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)", self.why, re.IGNORECASE)
        units = {"bytes": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
        wanted = float(found[1]) * units[found[2].lower()] if found else 0.0
        used = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return used + wanted

    def _there(self) -> float:
        """Bytes of memory that the device has."""
        if self.device.type == "cuda":
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        if self.device.type == "cpu" and hasattr(os, "sysconf"):
            return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        return 0.0

    def sentence(self, run: Path, saved: int | None) -> str:
        """Return the error: what ran out, what to do, and what is left of the run (`saved`: its last checkpoint)."""
        room = self._there()
        what = f"memory ran out on {self.device}" + (f" ({room / 2**30:.0f} GiB)" if room else "")
        if self.tokens is None or self.fitting() >= self.tokens:
            todo = f"one example of {self.longest} tokens is too much; lower data.max_len, or choose a smaller model"
        else:
            fitting = self.fitting()
            batches = self.accumulate * -(-self.tokens // fitting)
            todo = (
                f"a batch of {self.tokens:,} tokens is too much; try --set data.batching.tokens={fitting}, and "
                f"--set train.accumulate={batches} to learn from as many in a step"
            )
        if saved is None:
            return f"{what}: {todo}"
        return (
            f"{what}: {todo}; the checkpoint of step {saved} is intact: regard train --from {run} goes on from its "
            f"weights with another budget, regard resume {run} with this one where there is more memory"
        )


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "no reason given"
    return said if isinstance(error, RegardError) else f"{type(error).__name__}: {said[:200]}"


def facts(event: Mapping[str, Any]) -> str:
    """An event of kind "program" as a sentence."""
    names = {
        "eager": "steps run one operation after the other",
        "compiling": "compiling the step",
        "compiled": "the loss is compiled",
        "graph": "a step is one CUDA graph",
        "compiled graph": "a step is one compiled CUDA graph",
    }
    took = f" (ready after {event['seconds']:.0f} s)" if "seconds" in event else ""
    return f"{names[event['program']]}{took}{': ' + event['why'] if event.get('why') else ''}"
