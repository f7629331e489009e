"""One run of an ablation in a worker process: train and evaluate a model, or measure its training speed."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from regard.ablation.plan import early_step
from regard.ablation.results import DIVERGED, DONE, FAILED, Result, stored
from regard.data.prepare import Prepared, opened
from regard.decoding.beam import Beam
from regard.errors import DataError
from regard.evaluation.metrics import METRICS
from regard.evaluation.validation import measured, metric_for, validate
from regard.files import LOCK, clear, locked
from regard.processes import StoppedError, sentence, stop_requested
from regard.recipe.recipe import Recipe
from regard.runs.assemble import assemble, held_out, measure_of
from regard.runs.trained_model import choose_device
from regard.training.checkpoint import CheckpointPolicy, NewerFormatError, RunFolder, write_json
from regard.training.log import Log, environment
from regard.training.recovery import Recovery, newest_whole, reason
from regard.training.trainer import DivergedError, Event

Emit = Callable[[dict[str, Any]], None]
KEPT = ("job.json", "result.json", "log.jsonl", LOCK)
RARE = CheckpointPolicy(min_seconds=60.0, final=False)  # checkpoints only serve to resume


class Progress:
    """Emits an event with the step and the loss at every logged training step and every validation."""

    def __init__(self, emit: Emit, steps: int) -> None:
        self.emit, self.steps = emit, steps

    def note(self, event: Event) -> None:
        if event["event"] in ("step", "valid"):
            self.emit({"event": "step", "step": event["step"], "steps": self.steps, "loss": event["loss"]})


def _whole_checkpoint(run: RunFolder, emit: Emit) -> Recovery | None:
    """Return the newest whole checkpoint. If all are damaged, clear the folder, because a run can be repeated."""
    try:
        return newest_whole(run)
    except NewerFormatError:
        raise
    except DataError as error:
        problem = reason(error)
    clear(run.path, ("job.json", LOCK))
    emit({"event": "message", "text": f"{problem}; this training run starts again from step 0"})
    return None


def train(folder: Path, recipe: Recipe, data: Prepared, device: torch.device, order: Result, emit: Emit) -> Result:
    """Train a model and return its results, including the metric `order["metric"]`. A killed run is continued."""
    run, spec, records = RunFolder(folder), recipe.train, held_out(recipe, data)
    assert records is not None
    recovery = _whole_checkpoint(run, emit)
    watchers = [Log(run.log, recovery.progress.step if recovery else 0), Progress(emit, spec.steps or 0)]
    measure = measure_of(recipe, data, decode=0)
    trainer = assemble(recipe, data, run, device, watchers, measure, checkpoints=RARE)
    metric = metric_for(data.objective, order["metric"], spec.decode, order["trust_code"])
    companions = [METRICS[name]() for name in metric.companions if name != metric.name]
    metrics = measured(data.objective, spec.bleu_tokenize, metric.with_tokenizer(spec.bleu_tokenize), *companions)
    if recovery:
        trainer.resume(recovery)
    del recovery  # with its copies of all tensors

    def stop() -> str | None:
        if why := stop_requested():
            trainer.checkpointed = -math.inf  # save now, however recent the last checkpoint is
        return why

    outcome = trainer.fit(stop)
    if not outcome.finished:
        raise StoppedError(f"{outcome.why}, at step {outcome.step:,} of {trainer.steps:,}")
    outputs: list[str] = []
    with trainer.averaged(), torch.no_grad():
        final = validate(trainer.model.eval(), records, Beam(beam_size=1), spec.decode, metrics, outputs=outputs)
    if not math.isfinite(final["loss"]):
        raise DivergedError(f"the validation loss is {final['loss']} after training")
    logged = _read_log(run.log)
    early, machine = early_step(spec), environment(device)
    return {
        "early": {"step": early, "loss": dict(logged["curve"])[early]},
        "loss": final["loss"],
        "scores": final,
        "steps": spec.steps,
        **logged,
        **{name: machine[name] for name in ("device", "threads")},
        "torch": torch.__version__,
    } | ({"said": outputs} if order.get("texts") else {})


def speed(folder: Path, recipe: Recipe, data: Prepared, device: torch.device, seconds: float) -> float:
    """Return the training steps per second of a model, measured during `seconds` seconds.

    On a CPU, the CPU time of this process is measured, so that other processes do not change the result.
    """
    trainer = assemble(recipe, data, RunFolder(folder), device, checkpoints=RARE)
    began: list[tuple[int, float]] = []

    def clock() -> float:
        return time.monotonic() if device.type != "cpu" else time.process_time() / torch.get_num_threads()

    def stop() -> str | None:
        now = clock()
        if not began:  # the first step is slower than the others
            began.append((trainer.progress.step, now))
        return "measured" if now - began[0][1] > seconds else None

    outcome = trainer.fit(stop)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (outcome.step - began[0][0]) / (clock() - began[0][1])


def _read_log(path: Path) -> Result:
    """Return the validation losses and the training speed. The speed excludes validation and the first log interval."""
    with open(path, encoding="utf-8", newline="\n") as lines:
        events = [json.loads(line) for line in lines]
    losses = [(event["step"], event["loss"]) for event in events if event["event"] == "valid"]
    curve = [(step, math.nan if loss is None else loss) for step, loss in losses]  # null in the log means not finite
    times = [(event["step"], event["labels"], event["time"]) for event in events if event["event"] == "step"]
    first, last = times[0] if len(times) > 1 else (0, 0, 0.0), times[-1]
    seconds = max(last[2] - first[2], 1e-9)
    return {
        "curve": curve,
        "steps_per_second": (last[0] - first[0]) / seconds,
        "tokens_per_second": (last[1] - first[1]) / seconds,
        "training_seconds": last[2],
    }


def run(order: dict[str, Any], emit: Emit) -> Result:
    """Train a model and write the result to `result.json`. If `order` has `seconds`, only measure training speed."""
    folder = Path(order["folder"])
    recipe = Recipe.of(order["recipe"], order["trust_code"])
    device = choose_device(order["device"])

    def wait() -> None:  # a worker left by a killed command may need a moment to exit
        text = f"{folder} is in use by another process, perhaps left by a killed command; waiting for it"
        emit({"event": "message", "text": text})

    with locked(folder, wait=wait):
        data = opened(recipe.data, Path(order["data"]))
        if "seconds" in order:
            return {"steps_per_second": speed(folder, recipe, data, device, order["seconds"])}
        if (before := stored(folder / "result.json", order["metric"], order.get("texts", False))) is not None:
            return before  # another process has finished this run while this one waited
        began = time.monotonic()
        about = order["about"] | {"hash": folder.name}
        try:
            result = about | {"status": DONE} | train(folder, recipe, data, device, order, emit)
        except StoppedError:
            raise
        except DivergedError as error:
            result = about | {"status": DIVERGED, "error": str(error)}
        except Exception as error:  # the table shows the failure in the row of this model
            return about | {"status": FAILED, "error": sentence(error)}
        result["seconds"] = time.monotonic() - began
        write_json(folder / "result.json", result)
        clear(folder, KEPT)
        return result
