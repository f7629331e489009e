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
from regard.data.prepare import Prepared, opened
from regard.decoding.beam import Beam
from regard.evaluation.validation import measured, metric_for, validate
from regard.files import LOCK, clear, held
from regard.recipe.recipe import Recipe
from regard.runs.assemble import assemble, held_out, measure_of
from regard.runs.trained_model import choose_device
from regard.training.checkpoint import CheckpointPolicy, RunFolder, write_json
from regard.training.log import Log, environment
from regard.training.trainer import DivergedError, Event

Tell = Callable[[dict[str, Any]], None]
KEPT = ("job.json", "result.json", "log.jsonl", LOCK)
RARE = CheckpointPolicy(min_seconds=60.0, final=False)  # only the numbers of a run are kept, so it saves only to resume


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
    run, spec, records = RunFolder(folder), recipe.train, held_out(recipe, data)
    assert records is not None
    latest = run.latest()
    watchers = [Log(run.log, latest.step if latest else 0), Telling(tell, spec.steps or 0)]
    measure = measure_of(recipe, data, decode=0)
    trainer = assemble(recipe, data, run, device, watchers, measure, checkpoints=RARE)
    metric = metric_for(data.objective, order["metric"], spec.decode, order["trust_code"])
    metrics = measured(data.objective, spec.bleu_tokenize, metric.with_tokenizer(spec.bleu_tokenize))
    if latest:
        trainer.resume()
    trainer.fit()
    said: list[str] = []
    with trainer.averaged(), torch.no_grad():
        final = validate(trainer.model.eval(), records, Beam(beam_size=1), spec.decode, metrics, outputs=said)
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
    trainer = assemble(recipe, data, RunFolder(folder), device, checkpoints=RARE)
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
