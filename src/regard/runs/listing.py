"""A list of the training runs in a folder: state, progress, best score, time left, size and time of each.

Only small files are read: the log, the recipe and the job of a run. If a file is damaged or partly written, fields are
left empty, so that runs can be listed during training.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from regard.errors import DataError, SpecError, nearest
from regard.files import LOCK
from regard.runs.curves import Curve, curves_of, events_of, plot_curves
from regard.training.checkpoint import RunFolder, finite

try:
    import fcntl
except ImportError:  # without `fcntl`, there are no locks that show which runs are running
    fcntl = None

RUNNING, FINISHED, STOPPED, FAILED, WAITING = "running", "finished", "stopped", "failed", "waiting"
STATES = (RUNNING, WAITING, STOPPED, FAILED, FINISHED)
RECENT = 20  # logged steps from which the speed is computed
Json = dict[str, Any]


@dataclass(frozen=True)
class ListedRun:
    """One training run of a list, as its files describe it. A value that they do not contain is None."""

    name: str  # path relative to the listed folder
    path: str
    about: str  # for a run of an ablation: the row and the seed
    state: str  # one of STATES
    why: str  # why training ended or failed
    step: int
    steps: int | None  # planned steps
    metric: str | None  # the metric that ranks checkpoints
    score: float | None  # its value at the best checkpoint
    seconds_left: float | None  # if the run is running
    size: int  # bytes of all files
    modified: float  # time of the last change, in seconds since 1970
    curves: dict[str, Curve] = field(default_factory=dict, repr=False)

    def json(self) -> Json:
        when = datetime.fromtimestamp(self.modified, UTC).isoformat(timespec="seconds")
        return finite({name: value for name, value in asdict(self).items() if name != "curves"} | {"modified": when})


# Sort keys: the best first, the newest first, the largest first.
ORDERS: dict[str, Callable[[ListedRun], Any]] = {
    "name": lambda run: run.name,
    "state": lambda run: (STATES.index(run.state), run.name),
    "step": lambda run: (-run.step, run.name),
    "score": lambda run: (run.metric or "~", _cost(run), run.name),
    "left": lambda run: (math.inf if run.seconds_left is None else run.seconds_left, run.name),
    "size": lambda run: (-run.size, run.name),
    "time": lambda run: (-run.modified, run.name),
}


def list_runs(folder: str | Path, sort: str = "name") -> list[ListedRun]:
    """Return the training runs in a folder, at any depth, with their state, progress and best score.

        for run in regard.list_runs("runs"):
            print(run.name, run.state, run.step, run.score)

    The runs of an ablation are included. `sort` is "name", "state", "step", "score" (best first), "left" (least time
    first), "size" (largest first) or "time" (newest first).
    """
    root = Path(folder)
    if sort not in ORDERS:
        raise SpecError("--sort", f"unknown order {sort!r}; {nearest(sort, ORDERS)}")
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; name a folder that contains training runs")
    return sorted((_listed(path, root) for path in run_folders(root)), key=ORDERS[sort])


def plot_runs(runs: Sequence[ListedRun], path: str | Path) -> None:
    """Plot the validation curves of listed runs into a .png, .svg or .html file."""
    names = ["loss", *(run.metric for run in runs if run.metric)]
    metrics = [name for name in dict.fromkeys(names) if any(run.curves.get(name) for run in runs)]
    curves = {run.name: run.curves for run in runs if any(run.curves.get(name) for name in metrics[:2])}
    plot_curves(curves, metrics[:2], Path(path), "regard runs")


def run_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of training runs in `root` (or `root` itself, if it is one). Links are not followed."""
    for path, folders, files in os.walk(root):
        if {"request.json", "asked.json", "recipe.json"} & set(files) or _job(Path(path), files):
            folders.clear()
            yield Path(path)
        folders.sort()


def _job(path: Path, files: Sequence[str]) -> bool:
    """Return whether a folder is that of a run of an ablation."""
    return "job.json" in files and path.parent.name == "runs" and "recipe" in _json(path / "job.json")


def _listed(path: Path, root: Path) -> ListedRun:
    folder = RunFolder(path)
    events = list(events_of(folder.log))
    recipe, result = _recipe(folder), _json(path / "result.json")
    state, why = _state(folder, events, result)
    size, modified = _size(path)
    step, steps = _progress(events, recipe)
    criterion = _inner(recipe, "train").get("criterion")
    metric, score = _best(events, criterion if isinstance(criterion, str) else "loss", result)
    name = path.name if path == root else path.relative_to(root).as_posix()
    job = _json(path / "job.json")
    about = f"{job['row']} seed {job['seed']}" if {"row", "seed"} <= job.keys() else ""
    left = _seconds_left(events, steps, modified) if state == RUNNING else None
    return ListedRun(
        name, str(path), about, state, why, step, steps, metric, score, left, size, modified, curves_of(events)
    )


def _json(path: Path) -> Json:
    """Return the JSON object in a file, or an empty one if there is none or it is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_bytes())
        if isinstance(value, dict):
            return value
    return {}


def _inner(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _recipe(folder: RunFolder) -> Mapping[str, Any]:
    return _json(folder.recipe) or _inner(_json(folder.path / "job.json"), "recipe") or _json(folder.request)


def _state(folder: RunFolder, events: Sequence[Json], result: Json) -> tuple[str, str]:
    """Return the state of a run, and why it ended if the log or the result contains the reason."""
    trained = [event for event in events if event["event"] in ("step", "valid", "end")]
    last: Json = trained[-1] if trained else {}
    why = last["why"] if isinstance(last.get("why"), str) else ""
    if result.get("status") in ("diverged", "failed"):
        return FAILED, str(result.get("error", ""))
    if folder.final.exists() or result.get("status") == "done" or (last.get("event") == "end" and last.get("finished")):
        return FINISHED, why
    if is_locked(folder.path):
        return RUNNING, ""
    if not trained:
        return WAITING, ""
    if last.get("event") != "end" and "loss" in last and last["loss"] is None:  # the log has null for NaN
        return FAILED, f"the loss is not finite at step {last['step']:,}"
    return STOPPED, why or "killed"


def is_locked(folder: Path) -> bool:
    """Return whether a process has the lock of a folder, on this machine or where the file system shares locks."""
    if fcntl is None:
        return False
    with suppress(OSError), open(folder / LOCK, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
    return False


def _progress(events: Sequence[Json], recipe: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the last step, and the planned number of steps, which a time budget changes."""
    planned = [event["steps"] for event in events if type(event.get("steps")) is int]
    wanted = _inner(recipe, "train").get("steps")
    steps = planned[-1] if planned else wanted if type(wanted) is int else None
    return max((event["step"] for event in events), default=0), steps


def _best(events: Sequence[Json], criterion: str, result: Json) -> tuple[str | None, float | None]:
    """Return the name and the value of the metric at the best checkpoint, or the final loss of a run of an ablation."""
    if _number(result.get("loss")):
        return "loss", float(result["loss"])
    valid = {event["step"]: event for event in events if event["event"] == "valid"}
    if not valid:
        return None, None
    last = valid[max(valid)]
    best = valid.get(last["best"], last) if type(last.get("best")) is int else last
    name = criterion if _number(best.get(criterion)) else "loss"
    return (name, float(best[name])) if _number(best.get(name)) else (None, None)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _cost(run: ListedRun) -> float:
    """Return the score as a cost to minimise."""
    from regard.evaluation.metrics import METRICS  # noqa: PLC0415  # only to sort by score

    if run.score is None:
        return math.inf
    metric = METRICS.get(run.metric or "")
    return -run.score if metric is not None and metric.higher_is_better else run.score


def _seconds_left(events: Sequence[Json], steps: int | None, modified: float) -> float | None:
    """Return the estimated seconds until the last step, from the clock of the last logged steps."""
    times = [
        (event["step"], event["clock"]) for event in events if event["event"] == "step" and _number(event.get("clock"))
    ]
    recent = times[-RECENT:]
    if steps is None or len(recent) < 2 or recent[-1][0] <= recent[0][0]:
        return None
    rate = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
    return max(0.0, rate * (steps - recent[-1][0]) - max(0.0, time.time() - modified))


def _size(path: Path) -> tuple[int, float]:
    """Return the bytes of all files in a folder, and the time of the last change of a file."""
    size, modified = 0, 0.0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):  # removed meanwhile
                status = os.lstat(os.path.join(folder, name))
                size, modified = size + status.st_size, max(modified, status.st_mtime)
    return size, modified
