"""The log of a training run as events and validation curves, and a plot of the curves of several runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from regard.errors import DataError, SpecError
from regard.evaluation.metrics import METRICS

PLOTS = (".png", ".svg", ".html")
NAMED = 20  # a legend of more runs would hide the curves
Curve = list[tuple[int, float]]  # (step, value)


def events_of(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the events in a log file. Lines that are not valid events, such as partly written lines, are skipped."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str) and isinstance(event.get("step"), int):
            yield event


def curves_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the validation curves, keyed by metric: lists of (step, value)."""
    curves: dict[str, Curve] = {}
    for event in events:
        if event["event"] == "valid":
            for name in METRICS:
                if isinstance(event.get(name), int | float):
                    curves.setdefault(name, []).append((event["step"], float(event[name])))
    return curves


def check_plot(path: Path) -> None:
    """Raise an error if no plot can be drawn into a file with this name."""
    if path.suffix not in PLOTS:
        raise SpecError("--plot", f"{str(path)!r} is not a {', '.join(PLOTS[:-1])} or {PLOTS[-1]} file")
    try:
        import matplotlib  # noqa: F401, PLC0415  # an extra
    except ImportError:
        raise SpecError("--plot", "needs the package matplotlib: pip install 'regard[plot]'") from None


def plot_curves(
    curves: Mapping[str, Mapping[str, Curve]], metrics: Sequence[str], path: Path, title: str = "regard"
) -> None:
    """Plot the validation curves of runs into a .png, .svg or .html file, with one panel per metric."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    if not metrics:
        raise DataError("none of the runs has been validated yet, so there is no curve to plot")
    figure = Figure(figsize=(6 * len(metrics), 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for metric, axes in zip(metrics, figure.subplots(1, len(metrics), squeeze=False)[0], strict=True):
        for name, of_run in curves.items():
            if curve := of_run.get(metric):
                axes.plot(*zip(*curve, strict=True), marker=".", label=name.replace("$", r"\$"))
        axes.set_xlabel("step")
        axes.set_ylabel(f"validation {metric}")
        axes.grid(alpha=0.3)
        if len(curves) <= NAMED:
            axes.legend()
    buffer = BytesIO()
    figure.savefig(buffer, format="png" if path.suffix == ".png" else "svg")
    drawing = buffer.getvalue()
    if path.suffix == ".html":
        head = f'<!doctype html><meta charset="utf-8"><title>{title}</title>'.encode()
        drawing = head + drawing[drawing.index(b"<svg") :]
    try:
        path.write_bytes(drawing)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from None
