"""Compare training runs: recipe differences, model sizes, validation curves, best scores, speed and training time."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.errors import DataError
from regard.evaluation.metrics import METRICS
from regard.models.build import count
from regard.recipe.recipe import Recipe
from regard.runs.curves import Curve, curves_of, events_of, plot_curves
from regard.runs.trained_model import TrainedModel, read_recipe
from regard.training.checkpoint import RunFolder

BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ABSENT = "-"


@dataclass(frozen=True)
class RunSummary:
    """Summary of one training run, read from the recipe and the log in the run folder."""

    name: str
    path: str
    model: str
    parameters: int
    finished: bool
    step: int
    steps: int | None  # planned steps; None if a time budget ends the training
    seconds: float  # training time
    tokens_per_second: float | None  # median of the logged values
    device: str | None
    criterion: str  # the metric that ranks checkpoints
    curves: dict[str, Curve]  # validation curves, keyed by metric

    def best(self, metric: str) -> tuple[int, float] | None:
        """Return the step and the value of the best validation by `metric`, or None if `metric` was not measured."""
        curve = self.curves.get(metric)
        if not curve:
            return None
        return (max if METRICS[metric].higher_is_better else min)(curve, key=lambda point: point[1])


@dataclass(frozen=True, repr=False)
class RunComparison:
    """A comparison of training runs, which can be shown as a table, as JSON or as a plot of the validation curves."""

    runs: tuple[RunSummary, ...]
    differences: dict[str, tuple[Any, ...]]  # path in the recipe -> the value in each run

    @property
    def metrics(self) -> list[str]:
        """The metrics measured in any run: the loss, then the metrics that rank checkpoints, then all others."""
        names = ["loss", *(run.criterion for run in self.runs), *(name for run in self.runs for name in run.curves)]
        return [name for name in dict.fromkeys(names) if any(run.curves.get(name) for run in self.runs)]

    def json(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        best = [{metric: run.best(metric) for metric in self.metrics} for run in self.runs]
        runs = [asdict(run) | {"best": scores} for run, scores in zip(self.runs, best, strict=True)]
        return {"runs": runs, "differences": {path: list(values) for path, values in self.differences.items()}}

    def table(self) -> Table:
        """Return a table with one column per run."""
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for run in self.runs:
            table.add_column(Text(run.name), overflow="fold")
        for title, rows in self._sections().items():
            if rows:
                table.add_row(Text(title, "bold"))
            for name, cells in rows:
                table.add_row(Text(f"  {name}"), *(Text(cell) for cell in cells))
        return table

    def _sections(self) -> dict[str, list[tuple[str, list[str]]]]:
        runs, speeds = self.runs, [run.tokens_per_second for run in self.runs]
        training = [
            ("model", [run.model for run in runs]),
            ("parameters", [f"{run.parameters:,}" for run in runs]),
            ("steps", [_progress(run) for run in runs]),
            ("time", [_duration(run.seconds) for run in runs]),
            ("tokens/s", [ABSENT if speed is None else f"{speed:,.0f}" for speed in speeds]),
            ("device", [run.device or ABSENT for run in runs]),
        ]
        scores, curves = [], []
        for metric in self.metrics:
            best = [run.best(metric) for run in runs]
            scores.append((metric, [ABSENT if b is None else f"{b[1]:.4g} (step {b[0]:,})" for b in best]))
        for metric in self.metrics[:2]:
            lines = [[value for _, value in run.curves.get(metric, [])] for run in runs]
            low, high = min(v for line in lines for v in line), max(v for line in lines for v in line)
            curves.append((f"{metric} {low:.3g}..{high:.3g}", [_sparkline(line, low, high) for line in lines]))
        recipes = [(path, [_short(value) for value in values]) for path, values in self.differences.items()]
        return {
            "Training": training,
            "Best validation": scores,
            "Validation curves": curves,
            "Recipe (only what differs)": recipes,
        }

    def plot(self, path: str | Path) -> None:
        """Write a plot of the validation curves to a .png, .svg or .html file. Requires matplotlib."""
        curves = {run.name: run.curves for run in self.runs}
        plot_curves(curves, self.metrics[:2], Path(path), "regard compare")

    def __repr__(self) -> str:
        screen = Console(file=StringIO(), width=100, color_system=None, emoji=False, highlight=False)
        with screen.capture() as capture:
            screen.print(self.table())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def compare(*runs: str | Path | TrainedModel, trust_code: bool = False) -> RunComparison:
    """Compare training runs: recipes, model sizes, validation curves, best scores, speed and training time.

    Each run is given as a run folder or as a `TrainedModel`. Its training may still be in progress.

    print(regard.compare("runs/a", "runs/b"))
    regard.compare("runs/a", "runs/b").plot("curves.png")
    """
    paths = [run.path if isinstance(run, TrainedModel) else Path(run) for run in runs]
    if len(paths) < 2:
        raise DataError("a comparison needs at least two runs; give the folders of two or more")
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    recipes = [read_recipe(RunFolder(path), trust_code) for path in paths]
    summaries = tuple(_summary(*each) for each in zip(names, paths, recipes, strict=True))
    records = [recipe.record() for recipe in recipes]
    return RunComparison(summaries, {path: tuple(values) for path, values in differences(records)})


def _summary(name: str, path: Path, recipe: Recipe) -> RunSummary:
    events = list(events_of(RunFolder(path).log))
    speeds = [event["tokens_per_second"] for event in events if event.get("tokens_per_second")]
    devices = [event["device"] for event in events if event["event"] == "start" and "device" in event]
    return RunSummary(
        name,
        str(path),
        recipe.model.kind,
        count(recipe.model),
        RunFolder(path).final.exists(),
        max((event["step"] for event in events), default=0),
        recipe.train.steps,
        max((event.get("time") or 0.0 for event in events), default=0.0),
        median(speeds) if speeds else None,
        devices[-1] if devices else None,
        recipe.train.criterion,
        curves_of(events),
    )


def differences(values: Sequence[Any], path: str = "") -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield (path, values) for each path at which the given JSON values are not all equal.

    Objects of the same `kind` and lists of the same length are compared element by element.
    """
    if all(value == values[0] and type(value) is type(values[0]) for value in values):
        return
    if all(isinstance(value, dict) and value.get("kind") == values[0].get("kind") for value in values):
        for key in dict.fromkeys(key for value in values for key in value):
            yield from differences([value.get(key) for value in values], f"{path}.{key}".lstrip("."))
    elif all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        for i, items in enumerate(zip(*values, strict=True)):
            yield from differences(items, f"{path}[{i}]")
    else:
        yield path, values


def _progress(run: RunSummary) -> str:
    planned = "" if run.steps is None else f" of {run.steps:,}"
    return f"{run.step:,}{planned}{'' if run.finished else ', not finished'}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{seconds:.1f}s"


def _sparkline(values: Sequence[float], low: float, high: float, width: int = 20) -> str:
    """Return a sparkline (a line of bar characters) of at most `width` evenly spaced values, including the ends."""
    if not values:
        return ABSENT
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def _short(value: Any) -> str:
    """Return a recipe value as short text for a table cell. A model or recipe part is abbreviated to its `kind`."""
    if isinstance(value, dict):
        return str(value.get("kind", "table"))
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-18:]}"
