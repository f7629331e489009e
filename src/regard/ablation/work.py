"""One run, and the process that makes one after the other: `python -m regard.ablation.work`.

It reads jobs from standard input and writes what happens to standard output, a JSON object a line. When its standard
input ends, whoever gave the jobs is gone, and it leaves at once.
"""

import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from regard.ablation.plan import early_step
from regard.ablation.results import DIVERGED, DONE, FAILED, Result
from regard.data.loader import BatchLoader, Examples
from regard.data.prepare import Prepared, opened
from regard.decoding.beam import Beam
from regard.evaluation.validation import ROUGE, HeldOut, validate
from regard.files import LOCK, clear, held
from regard.models.build import build
from regard.planner import fit as fitting
from regard.recipe.recipe import Recipe
from regard.runs.trained_model import choose_device
from regard.training.checkpoint import RunFolder, write_json
from regard.training.log import Log, environment
from regard.training.trainer import DivergedError, Event, Trainer

Tell = Callable[[dict[str, Any]], None]
KEPT = ("job.json", "result.json", "log.jsonl", LOCK)


class Measured(Trainer):
    """A training whose numbers are wanted and not its weights: it saves now and then, only to be resumed."""

    seldom = 60.0  # seconds between checkpoints

    saved_at = 0.0

    def fit(self, stop: Callable[[], str | None] = lambda: None) -> Any:
        """Train to the end."""
        self.saved_at = time.monotonic()
        return super().fit(stop)

    def save(self, regular: bool = True) -> None:
        """Write a checkpoint, if the last one is old."""
        if time.monotonic() - self.saved_at >= self.seldom and self.progress.step < self.steps:
            super().save(regular)
            self.saved_at = time.monotonic()

    def finish(self) -> None:
        """Nothing is kept."""


class Telling:
    """Tells of steps and validations as they come."""

    def __init__(self, tell: Tell, steps: int) -> None:
        self.tell, self.steps = tell, steps

    def note(self, event: Event) -> None:
        """Pass on how far it is."""
        if event["event"] in ("step", "valid"):
            self.tell({"event": "step", "step": event["step"], "steps": self.steps, "loss": event["loss"]})


def train(folder: Path, recipe: Recipe, data: Prepared, device: torch.device, order: Result, tell: Tell) -> Result:
    """Train and measure one run by `order["metric"]`, or go on with one that was killed."""
    run, spec = RunFolder(folder), recipe.train
    held_out, model = _held_out(recipe, data), build(recipe.model, device, seed=spec.seed)
    latest = run.latest()
    log = Log(run.log, latest.step if latest else 0)
    trainer = _trainer(Measured, model, recipe, data, run, [log, Telling(tell, spec.steps or 0)])
    trainer.measure = lambda model: validate(model, held_out, Beam(beam_size=1), 0, spec.bleu_tokenize)
    if latest:
        trainer.resume()
    trainer.fit()
    said: list[str] = []
    with trainer.averaged(), torch.no_grad():
        rouge = order["metric"] in ROUGE
        final = validate(model.eval(), held_out, Beam(beam_size=1), spec.decode, spec.bleu_tokenize, rouge, said)
    if not math.isfinite(final["loss"]):
        raise DivergedError(f"the validation loss is {final['loss']} after training")
    logged = _read_log(run.log)
    early = early_step(spec)
    found = environment(device)
    return {
        "early": {"step": early, "loss": dict(logged["curve"])[early]},
        "loss": final["loss"],
        "scores": final,
        "steps": spec.steps,
        **logged,
        "device": found["device"],
        "threads": found["threads"],
        "torch": torch.__version__,
    } | ({"said": said} if order.get("texts") else {})


def speed(folder: Path, recipe: Recipe, data: Prepared, device: torch.device, seconds: float) -> float:
    """Steps a second of a model, over `seconds` of training.

    On a CPU these are seconds in which it worked: what else the machine does meanwhile takes nothing from its budget.
    """
    model = build(recipe.model, device, seed=recipe.train.seed)
    trainer = _trainer(Measured, model, recipe, data, RunFolder(folder), [])
    began: list[tuple[int, float]] = []

    def clock() -> float:
        return time.monotonic() if device.type != "cpu" else time.process_time() / torch.get_num_threads()

    def stop() -> str | None:
        now = clock()
        if not began:  # the first step is slower than all others
            began.append((trainer.progress.step, now))
        return "measured" if now - began[0][1] > seconds else None

    outcome = trainer.fit(stop)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (outcome.step - began[0][0]) / (clock() - began[0][1])


def _trainer(
    kind: type[Measured], model: Any, recipe: Recipe, data: Prepared, run: RunFolder, watchers: list[Any]
) -> Measured:
    assert recipe.data.batching is not None
    stream = BatchLoader(Examples(data.train, data.weights, data.objective), recipe.data.batching, recipe.train.seed)
    return kind(model, recipe.train, stream, run, None, watchers)


def _held_out(recipe: Recipe, data: Prepared) -> HeldOut:
    batching = recipe.data.batching
    assert batching is not None
    assert data.valid is not None
    return HeldOut(
        data.objective,
        data.valid,
        data.valid_texts,
        data.tokenizers,
        fitting.padded(batching) if batching.packed else batching,
        data.valid_survey.bytes,
        recipe.data.longest,
        recipe.length_limit,
    )


def _read_log(path: Path) -> Result:
    """The validation losses by step, and how fast training was without validation; the first stretch warms up."""
    with open(path, encoding="utf-8", newline="\n") as lines:
        events = [json.loads(line) for line in lines]
    losses = [(event["step"], event["loss"]) for event in events if event["event"] == "valid"]
    curve = [(step, math.nan if loss is None else loss) for step, loss in losses]  # null: no number
    times = [(event["step"], event["labels"], event["time"]) for event in events if event["event"] == "step"]
    first, last = times[0] if len(times) > 1 else (0, 0, 0.0), times[-1]
    seconds = max(last[2] - first[2], 1e-9)
    return {
        "curve": curve,
        "steps_per_second": (last[0] - first[0]) / seconds,
        "tokens_per_second": (last[1] - first[1]) / seconds,
        "training_seconds": last[2],
    }


def do(order: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Carry out one order: a run, of which the result stays in its folder, or a measurement of speed."""
    folder = Path(order["folder"])
    recipe = Recipe.of(order["recipe"], order["trust_code"])
    device = choose_device(order["device"])

    def wait() -> None:  # a killed command's worker may need a moment to notice
        said = f"{folder} is being worked on by another process, perhaps left by a killed command; waiting for it"
        tell({"event": "say", "sentence": said})

    with held(folder, wait=wait):
        data = opened(recipe.data, Path(order["data"]))
        if "seconds" in order:
            return {"steps_per_second": speed(folder, recipe, data, device, order["seconds"])}
        began = time.monotonic()
        about = order["about"] | {"hash": folder.name}
        try:
            result = about | {"status": DONE} | train(folder, recipe, data, device, order, tell)
        except DivergedError as error:
            result = about | {"status": DIVERGED, "error": str(error)}
        except Exception as error:  # one row's failure is its cell
            return about | {"status": FAILED, "error": _sentence(error)}
        result["seconds"] = time.monotonic() - began
        write_json(folder / "result.json", result)
        clear(folder, KEPT)
        return result


def _sentence(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    first = next(iter(str(error).splitlines()), "")
    return first if type(error).__module__.startswith("regard.") else f"{type(error).__name__}: {first}"


def main() -> None:
    """Carry out orders until there are none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the one that gave the orders decides
    told = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what a library prints must not come between the lines
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()

    def tell(event: dict[str, Any]) -> None:
        told.write(json.dumps(event) + "\n")

    while True:
        order = json.loads(orders.get())
        try:
            tell({"event": "done", "result": do(order, tell)})
        except Exception as error:
            tell({"event": "done", "result": {"status": FAILED, "error": _sentence(error)}})


def _listen(orders: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        orders.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
