"""The trainer runs training steps, validation and early stopping, and writes checkpoints. Training resumes exactly.

The random numbers of a step depend only on the seed and the step. The batches depend only on the seed, the epoch and
the position in the epoch. So checkpoints do not store the state of a random number generator, and neither validation
nor an interruption changes the result of training.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from regard import fast
from regard.data.loader import BatchLoader, Prefetch
from regard.data.objectives import Item
from regard.errors import DataError, OutOfMemoryError, RegardError, SpecError, lacks_memory
from regard.models.base import Model
from regard.nn.core import Reporting
from regard.training.activation_checkpointing import checkpoint_blocks
from regard.training.background_saving import BackgroundSaver, HostCopy
from regard.training.budget import Budget
from regard.training.checkpoint import CheckpointPolicy, RunFolder, saving
from regard.training.early_stopping import improvements, should_stop
from regard.training.executor import (
    Eager,
    StepExecutor,
    StepScalars,
    Update,
    choose_executor,
)
from regard.training.log_window import LogWindow
from regard.training.mfu import peak, utilisation
from regard.training.out_of_memory import MemoryShortage, RowMemoryError, SplitSteps
from regard.training.parallel.gradients import check_batches, share
from regard.training.parallel.group import ALONE, Group
from regard.training.parallel.sharded_checkpoint import host_copy
from regard.training.progress import Progress
from regard.training.ranking import LOSS, Criterion, Metrics, order
from regard.training.recovery import Recovery, newest_whole, reason
from regard.training.schedule import Schedule
from regard.training.skipped_steps import Decoders, not_finite, store
from regard.training.spec import TrainSpec
from regard.training.tensor_files import mean, read_weights

Event = Mapping[str, Any]
MEAN = -1  # step number of the averaged checkpoints in the ranking; if all scores are equal, it comes first
SMALLEST_SCALE = 1e-4  # smallest loss scale in float16; the first is 65,536


@runtime_checkable
class Watcher(Protocol):
    """Protocol of objects that receive the events of training, such as the log, TensorBoard and the console."""

    def note(self, event: Event) -> None:
        """Process an event.

        `event["event"]` is start, executor, step, skipped, split, valid, save, damaged, final or end.
        """
        ...


class DivergedError(RegardError, ArithmeticError):
    """Error when training diverges: the loss or its gradient is not finite."""


@dataclass(frozen=True)
class Outcome:
    """The result of `Trainer.fit`: how and at which step training ended."""

    finished: bool  # False: training can be resumed
    why: str  # the reason
    step: int
    exit_code: int = 0  # of the process: 128 + the number of the signal that stopped training


class Trainer:
    """Trains a model on the batches from a loader, and writes checkpoints to the folder of a training run."""

    def __init__(  # noqa: PLR0913  # the parts of a training run
        self,
        model: Model,
        spec: TrainSpec,
        loader: BatchLoader,
        folder: RunFolder,
        measure: Callable[[Model], Metrics] | None = None,
        watchers: Sequence[Watcher] = (),
        criterion: Criterion = LOSS,
        *,
        flops_per_token: float | None = None,
        began: float | None = None,
        trained: bool = False,
        plain: bool = False,
        checkpoints: CheckpointPolicy = CheckpointPolicy(),
        group: Group = ALONE,
        decoders: Decoders = MappingProxyType({}),
    ) -> None:
        """`measure(model)` returns the validation metrics, including `criterion`. If it is None, nothing is validated.

        `flops_per_token` is the number of FLOPs of a forward pass per label; the logged MFU is computed from it.
        `began` is the `time.monotonic()` at which a time budget starts. If `trained` is true, the initial weights are
        already trained. They are validated before the first step, and they become the final weights if no later
        checkpoint is better. If `plain` is true, training does not use the kernels of `regard.fast`, compilation or
        CUDA graphs. `group` has the processes that train the model together: each computes some batches of every step,
        and rank 0 validates and writes all files. `decoders` decode the token ids of batches that are stored because
        their loss is not finite.
        """
        assert spec.steps, "resolved before training"
        self.model, self.spec, self.loader, self.folder = model, spec, loader, folder
        self.measure, self.watchers, self.criterion = measure, watchers, criterion
        self.trained, self.checkpoints, self.decoders = trained, checkpoints, decoders
        self.checkpointed = time.monotonic()  # time of the last checkpoint
        self.settled = False  # True: steps have their usual speed; the first steps, and steps that compile, are slower
        self.group = group
        self.device = group.device or next(model.parameters()).device
        self.plain = plain
        if plain and spec.compile:
            raise SpecError(
                "train.compile",
                "has no effect with --plain, which runs the model as it is written; leave one of the two out",
            )
        check_batches(spec.accumulate, group, spec.parallel == "shard")
        if not plain:
            fast.install(model, self.device)
        if spec.checkpoint_layers:
            checkpoint_blocks(model)
        self.gradients = share(model, spec, group, plain, self.lacks_gradients)
        self.budget = Budget(spec.time, began)
        if spec.optimizer is None:
            raise SpecError("train.optimizer", "is not chosen yet; give one, such as AdamW(1e-3)")
        self.kind, self.optimizer = spec.optimizer.kind, spec.optimizer.build(model)
        self.dtype = precision(spec, self.device)
        self.flops_per_token, self.peak = flops_per_token, peak(self.device, self.dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)
        self.ema = {n: p.detach().clone() for n, p in model.named_parameters()} if spec.ema else None
        self.reporting = [part for part in model.modules() if isinstance(part, Reporting)]
        self.progress = Progress(steps=spec.steps)
        self.window = LogWindow()
        self.diverged: str | None = None  # the problem of the last of `max_skipped` skipped steps in a row
        self.prefetch: Prefetch | None = None
        self.saver = BackgroundSaver()
        self.validating = False
        self.update = Update(
            model, model.loss, self.optimizer, spec.clip, self.device, self.dtype, self.scaler, self.ema, self.gradients
        )
        self.executor: StepExecutor = Eager(self.update)
        self.splitter = SplitSteps(self.executor, self.update, self.emit, self.progress.parts)

    def resume(self, recovery: Recovery | None = None) -> bool:
        """Load the newest checkpoint that is whole (`recovery`), and return True; return False if there is none."""
        recovery = recovery or newest_whole(self.folder)
        found = None if recovery is None else recovery.progress.step
        if self.group.alone(lambda: found) != found:
            raise DataError(
                f"{self.folder.path} differs between the processes; train in a folder that all machines share"
            )
        if recovery is None:
            return False
        self.progress = progress = recovery.progress
        weights, trainer = recovery.weights, recovery.trainer
        for problem in recovery.damaged:
            self.emit("damaged", problem=f"{problem}; training resumes from the checkpoint of step {progress.step:,}")
        if self.ema is not None:
            for name, tensor in weights.items():
                if name in self.ema:
                    self.ema[name].copy_(self.gradients.placed(tensor, self.ema[name]))
            weights = without_prefix(trainer, "raw.")
        self._load_weights(weights)
        self.optimizer.load(without_prefix(trainer, "optimizer."), self.gradients.placed)
        for metrics in self.progress.scores.values():  # changes only checkpoints of versions without `reached`
            self.progress.reached |= improvements(self.progress.reached, metrics, self.criterion)
        if self.progress.scaler:
            self.scaler.load_state_dict(self.progress.scaler)
        # Older checkpoints do not store the number of steps.
        self.progress.steps = self.progress.steps or self.spec.steps or 0
        self.budget.earlier, self.budget.validation = self.progress.clock, self.progress.validation
        return True

    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        try:
            self.gradients.load(self.model, weights)
        except RuntimeError as error:
            problem = " ".join(str(error).split())[:200]
            raise DataError(
                f"{self.folder.path}: the weights of step {self.progress.step} do not fit the model of recipe.json "
                f"({problem}); restore both from a copy"
            ) from None

    def lacks_gradients(self) -> bool:
        """Return whether some weights receive no gradient from the first batch."""
        batch = self.loader.item(self.loader.plan(0), 0).batch.to(self.device)
        self.model.train()
        loss = self.model.loss(batch)
        (loss.total + loss.aux).backward()
        lacking = any(parameter.requires_grad and parameter.grad is None for parameter in self.model.parameters())
        self.model.zero_grad(set_to_none=True)
        return lacking

    @property
    def steps(self) -> int:
        """The step at which training ends; with a time budget, the latest estimate of that step."""
        return self.progress.steps

    def fit(self, stop: Callable[[], str | None] = lambda: None) -> Outcome:
        """Train to the end. `stop` is called after every step; if it returns a reason, save a checkpoint and stop."""
        try:
            with self.saver:
                return self._fit(stop)
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            why, row = str(error), str(error) if isinstance(error, RowMemoryError) else None
        # After the handler, because the error keeps all tensors of the step in memory.
        if self.validating:
            advice = "lower data.batching.tokens, or truncate long texts with data.max_len"
            if "text" in self.loader.examples.objective.provides:
                fewer = "translate fewer records with --set train.decode=16 (0: none)"
                advice = f"{fewer}, or leave out long ones with data.max_len"
            raise OutOfMemoryError(f"memory ran out on {self.device} while validating; {advice}")
        longest = max(int(lengths.max()) for lengths in self.loader.examples.lengths.values())
        tokens, saved = getattr(self.loader.batching, "tokens", None), self.folder.checkpoints()
        shortage = MemoryShortage(why, self.device, tokens, self.spec.accumulate, longest, row)
        raise OutOfMemoryError(shortage.message(self.folder.path, saved[-1] if saved else None))

    def _fit(self, stop: Callable[[], str | None]) -> Outcome:
        progress = self.progress
        self.emit("start", steps=self.steps, device=str(self.device), precision=str(self.dtype or torch.float32))
        if not self.plain:
            self.executor = choose_executor(
                self.update, self.loader.one_shape, self.spec.compile, self.seconds_left, self.emit
            )
        if self.group.device is None:
            self.splitter = SplitSteps(self.executor, self.update, self.emit, progress.parts)
        else:  # the other processes could not repeat their part of a step
            self.splitter = self.executor
        self.prefetch = self.batches()
        self.counts()  # discards earlier counts
        self.budget.validated = self.checkpointed = time.monotonic()
        if self.trained and progress.step == 0 and not progress.scores and self.measure is not None:
            self.validate()
            self.save()
        self.window, self.settled = LogWindow(), False
        try:
            while progress.step < self.steps and not self.exhausted():
                self.step()
                if progress.step % self.spec.log_every == 0:
                    self.note_window()
                self.saver.check()
                progress.steps = self.last_step()
                self.validate_and_save()
                why = self.group.reason(stop())
                if why and progress.step < self.steps and not self.exhausted():
                    self.note_window()  # raises an error if training has diverged, before such weights are saved
                    if progress.saved[-1:] != [progress.step]:
                        self.save(regular=False)
                    self.wait_for_checkpoint()
                    self.emit("end", finished=False, why=why)
                    return Outcome(False, why, progress.step)
        finally:
            self.prefetch.close()
        self.wait_for_checkpoint()
        why = f"all {self.steps:,} steps done"
        if self.exhausted():
            why = f"no improvement in {progress.stale} validations"
        elif self.steps < (self.spec.steps or 0):
            why = "time budget used"
        if self.checkpoints.final:
            self.group.alone(self.save_final)
        self.emit("end", finished=True, why=why)
        return Outcome(True, why, progress.step)

    def batches(self) -> Prefetch:
        """Return the batches after those already trained on; those of other processes are None."""
        size, pinned = self.group.size, self.device.type == "cuda"
        if size == 1:
            return Prefetch(self.loader, self.progress.place, pinned)

        def own(number: int) -> bool:
            return number % self.spec.accumulate % size == self.group.rank

        return Prefetch(self.loader, self.progress.place, pinned, 8 * size, own)

    def last_step(self) -> int:
        """Return the step at which training ends; with a time budget, rank 0 estimates it anew."""
        planned = min(self.spec.steps or 0, self.budget.steps(self.progress.step, self.progress.steps))
        return int(self.group.first([planned])[0]) if self.spec.time else planned

    def exhausted(self) -> bool:
        """Return whether to stop early, after `patience` validations without improvement."""
        return should_stop(self.progress.stale, self.spec.patience)

    def step(self) -> None:
        """Update the weights by the gradient of the mean loss over all labels of `accumulate` batches."""
        assert self.prefetch is not None
        progress, started = self.progress, time.perf_counter()
        progress.step += 1
        place = progress.place
        self.model.train()
        items: list[Item] = []
        counts = []
        for _ in range(self.spec.accumulate):
            item, progress.place = self.prefetch.next()
            counts.append(0 if item is None else self.count_labels(item))
            items += [] if item is None else [item]
        labels = sum(int(count) for count in self.group.sums(counts))
        # The decay is small at first, so that the moving average soon forgets the untrained weights.
        decay = min(self.spec.ema, (1 + progress.step) / (10 + progress.step))
        scalars = StepScalars(float(labels), decay, [self.count_labels(item) / labels for item in items])
        self.optimizer.set_rates(self.schedule().factor(progress.step, self.steps))
        result = self.splitter.run([item.batch for item in items], scalars, step_seed(self.spec.seed, progress.step))
        self.window.add(progress.step, place, items, result, labels)
        progress.labels += labels
        spent = time.perf_counter() - started
        progress.seconds += spent
        if self.device.type == "cpu":  # on other devices, the host does not wait for the end of a step
            if self.settled:
                self.budget.add(1, spent)
            self.settled = True
            self.check_steps()
            if self.diverged:
                self.note_window()  # raises an error

    def check_steps(self) -> None:
        """Store the batches of steps that were skipped because their loss or gradient is not finite.

        On a GPU this waits for the device, so it is called only before metrics are logged.
        """
        scaled, progress = self.scaler.is_enabled(), self.progress
        for record in self.window.unchecked():
            why = not_finite(record, scaled)
            progress.skipped = progress.skipped + 1 if why else 0
            if why:
                file = None
                if self.group.leads:
                    file = store(self.folder, self.loader, record, self.spec.accumulate, self.decoders)
                event = {"problem": why, "loss": record.loss, "gradient": record.gradient, "file": file}
                self.emit("skipped", **{"step": record.step} | event)
            if progress.skipped >= self.spec.max_skipped:
                self.diverged = why
                return

    def count_labels(self, item: Item) -> int:
        """Return the number of labels of a batch, including source tokens if the training loss includes them."""
        return item.places - item.padding if self.model.predicts_source else item.labels

    def seconds_left(self, step: float) -> float:
        """Return the remaining training time in seconds; `step` is the duration of a step in seconds."""
        return self.budget.left if self.spec.time else (self.steps - self.progress.step) * step

    def schedule(self) -> Schedule:
        """Return the learning rate schedule. With a time budget, its warm-up is at most a tenth of the steps."""
        schedule = self.spec.schedule
        warmup = getattr(schedule, "warmup", None)
        if self.spec.time is None or warmup is None:
            return schedule
        return replace(schedule, warmup=min(warmup, max(1, self.steps // 10)))  # type: ignore[reportCallIssue]

    def note_window(self) -> None:
        """Emit the metrics of the `LogWindow` and start a new window; raise DivergedError if training has diverged."""
        if not self.window.results:
            return
        waited = time.perf_counter()
        self.check_steps()
        metrics = self.window.metrics(self.scaler.is_enabled(), self.group)  # waits for the device
        counts = self.counts()
        self.progress.seconds += time.perf_counter() - waited
        if self.device.type == "cuda":
            metrics["memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        if self.flops_per_token and self.peak:
            speed = metrics["tokens_per_second"] / self.group.size
            metrics["mfu"] = utilisation(self.flops_per_token, speed, self.peak)
        state = {"steps": self.steps, "learning_rate": self.optimizer.rate, "epoch": self.progress.place.epoch}
        self.emit("step", **counts | state | {"labels": self.progress.labels} | metrics)
        if self.device.type != "cpu":
            if self.settled:
                self.budget.add(len(self.window.results), time.perf_counter() - self.window.began)
            self.settled = True
        self.window = LogWindow()
        wrong = self.diverged
        # A float16 gradient may overflow: the step is skipped and the loss scale lowered, down to a limit.
        if self.scaler.is_enabled() and self.scaler.get_scale() < SMALLEST_SCALE:
            wrong = wrong or "the gradient overflows float16 at every loss scale"
        if wrong:
            raise DivergedError(
                f"{wrong} at step {self.progress.step}: training diverged; lower train.optimizer.learning_rate "
                f"(of train.optimizer={self.kind}) or lengthen train.schedule.warmup (the last checkpoint is intact)"
            )

    def counts(self) -> dict[str, int | float]:
        """Return the counts of modules such as experts since the last call. Counts with the same name are summed."""
        totals: dict[str, Tensor] = {}
        for part in self.reporting:
            for name, count in part.report().items():
                totals[name] = totals[name] + count if name in totals else count
        sums = self.group.sums([total.item() for total in totals.values()])
        return {name: type(total.item())(value) for (name, total), value in zip(totals.items(), sums, strict=True)}

    def validate_and_save(self) -> None:
        """Validate the model if that is due after this step, and write a checkpoint if that is due."""
        step = self.progress.step
        due = (
            bool(self.group.first([self.budget.due()])[0])
            if self.spec.time
            else step % (self.spec.validate_every or self.steps) == 0
        )
        due = due or step == self.steps
        if due and self.measure is not None:
            self.note_window()
            self.validate()
        if due or (self.spec.save_every and step % self.spec.save_every == 0):
            self.note_window()
            began = time.perf_counter()
            self.save()
            self.budget.saving = max(time.perf_counter() - began, self.saver.seconds)
            self.window = LogWindow()  # a new window, because validating and saving do not count as training time

    def validate(self) -> None:
        """Validate the model, rank the step among those validated, and record whether criterion or loss improved."""
        assert self.measure is not None
        progress, began = self.progress, time.perf_counter()
        with self.averaged():
            model = self.gradients.whole(self.model)
            metrics = self.group.alone(lambda: self.metrics(model))
        progress.scores[progress.step] = metrics
        better = improvements(progress.reached, metrics, self.criterion)
        progress.reached |= better
        progress.best = order(progress.scores, self.criterion, progress.reached)[: self.spec.average]
        progress.stale = 0 if better else progress.stale + 1
        progress.validation = time.perf_counter() - began
        self.budget.note_validation(progress.validation)
        self.emit("valid", best=progress.best[0], seconds=progress.validation, **metrics)

    @torch.no_grad()
    def metrics(self, model: Model) -> Metrics:
        """Return the metrics of a model on the validation text."""
        assert self.measure is not None
        self.validating = True
        metrics = self.measure(model.eval())
        self.validating = False
        return metrics

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the weights by their moving average inside a `with` block, if there is a moving average."""
        if self.ema is None:
            yield
            return
        raw = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._set(self.ema)
        try:
            yield
        finally:
            self._set(raw)

    @torch.no_grad()
    def _set(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])

    def save(self, regular: bool = True) -> None:
        """Write a checkpoint in the background, after the previous one has been written.

        If `regular` is false (training is interrupted), the checkpoint is never averaged.
        """
        progress, policy = self.progress, self.checkpoints
        if not policy.final and progress.step >= self.steps:
            return
        if time.monotonic() - self.checkpointed < policy.min_seconds:
            return
        progress.clock = self.budget.elapsed
        if regular:
            progress.saved = [*(s for s in progress.saved if s != progress.step), progress.step][-self.spec.keep :]
            kept = {*progress.saved, *progress.best}
            progress.scores = {step: scores for step, scores in progress.scores.items() if step in kept}
        if self.scaler.is_enabled():
            progress.scaler = self.scaler.state_dict()
        self.wait_for_checkpoint()  # before copying, so that at most one copy is in memory
        tensors = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        if self.ema is not None:
            tensors |= {f"raw.{name}": tensor for name, tensor in self.model.state_dict().items()}
        trainer = host_copy(tensors, self.folder.path, self.group)
        with self.averaged():
            weights = host_copy(self.model.state_dict(), self.folder.path, self.group)
        if trainer is not None and weights is not None:
            self.start_saving(weights, trainer)
        self.checkpointed = time.monotonic()
        self.emit("save")

    def wait_for_checkpoint(self) -> None:
        """Wait until rank 0 has written the last checkpoint. It sends heartbeats, so a slow disk causes no timeout."""
        self.group.alone(self.saver.wait)

    def save_final(self) -> None:
        """Choose the final weights and write them."""
        steps, weights, scores = self.final_weights()
        self.folder.save_final(weights, {"steps": json.dumps(steps), "scores": json.dumps(scores)})
        kept = {*self.progress.saved, *self.progress.best}
        self.folder.prune(kept, self.progress.step)  # older ones are no longer resumed

    def start_saving(self, weights: HostCopy, trainer: HostCopy) -> None:
        """Write a checkpoint in the background."""
        progress = self.progress
        step, record, kept = progress.step, progress.record(), {*progress.saved, *progress.best}

        def write() -> None:
            self.folder.save(step, weights.tensors(), trainer.tensors(), record)
            with saving(self.folder.path):
                self.folder.prune(kept, step, self.spec.keep_state)

        self.saver.start(write)

    def final_weights(self) -> tuple[list[int], dict[str, Tensor], Metrics]:
        """Return steps, weights and metrics of the averaged checkpoints, or of the best checkpoint if it is better."""
        progress = self.progress
        steps = self.whole_checkpoints()
        measured = {step: progress.scores[step] for step in steps if step in progress.scores}
        if len(steps) == 1:
            return steps, read_weights(self.folder.weights(steps[0])), progress.scores.get(steps[0], {})
        weights = mean(read_weights(self.folder.weights(step)) for step in steps)
        if self.measure is None:
            return steps, weights, {}
        model = self.gradients.replaceable(self.model)
        model.load_state_dict(weights)
        scores = self.metrics(model)
        reached = progress.reached | improvements(progress.reached, scores, self.criterion)
        first = order(measured | {MEAN: scores}, self.criterion, reached)[0]
        self.emit("final", steps=steps, kept=steps if first == MEAN else [first], **scores)
        if first == MEAN:
            return steps, weights, scores
        return [first], read_weights(self.folder.weights(first)), measured[first]

    def whole_checkpoints(self) -> list[int]:
        """Return the steps of the best or last checkpoints, without those whose weights are damaged."""
        best = self.progress.best if self.spec.choose == "best" else []
        steps = [step for step in best or self.progress.saved[-self.spec.average :] if self._whole(step)]
        others = (step for step in reversed(self.folder.steps()) if self._whole(step))
        steps = steps or [step for step in (next(others, None),) if step is not None]
        if not steps:
            raise DataError(f"{self.folder.path} has no checkpoint whose weights are whole; restore one from a copy")
        return steps

    def _whole(self, step: int) -> bool:
        try:
            read_weights(self.folder.weights(step))
        except DataError as error:
            self.emit("damaged", problem=f"{reason(error)}; the final weights are chosen from the other checkpoints")
            return False
        return True

    def emit(self, event: str, **values: Any) -> None:
        if event == "executor":  # the duration of steps changes
            self.settled = False
            self.budget.forget()
        progress, clock = self.progress, self.budget.elapsed
        record = {"event": event, "step": progress.step, "time": progress.seconds, "clock": clock} | values
        for watcher in self.watchers:
            watcher.note(record)


def without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def step_seed(seed: int, step: int) -> int:
    """Return the seed for the random numbers of a training step, such as dropout masks."""
    return int(np.random.SeedSequence([seed % 2**64, step]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def precision(spec: TrainSpec, device: torch.device) -> torch.dtype | None:
    """Return the dtype for autocast; None means float32 without autocast."""
    if spec.precision == "float32" or (spec.precision == "auto" and device.type != "cuda"):
        return None
    if spec.precision == "auto":
        real = torch.cuda.is_bf16_supported(including_emulation=False)  # older GPUs emulate it slowly
        return torch.bfloat16 if real else torch.float16
    if device.type == "cpu":
        raise DataError(f"train.precision: a CPU trains in float32, not {spec.precision}; leave it at auto")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[spec.precision]
