"""The command `runs`: list the training runs in a folder."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.base import STUDY, AsJson, console, print_json
from regard.cli.options import command

if TYPE_CHECKING:
    from regard.runs.listing import ListedRun


@command(STUDY)
def runs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder that contains training runs, at any depth.")],
    sort: Annotated[
        str,
        typer.Option(
            metavar="ORDER", help="Order: name, state, step, score, left (time left), size or time (last change)."
        ),
    ] = "name",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the validation curves into this .png, .svg or .html file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the training runs in a folder: state, steps, best score, time left, size and time of the last change.

    A run is running, finished, stopped (`regard resume` continues it), failed, or waiting (not started yet). The runs
    of an ablation or a ladder are included. Only small files of a run are read, so runs can be listed while they train.
    """
    from regard.runs.curves import check_plot
    from regard.runs.listing import list_runs, plot_runs

    if plot is not None:
        check_plot(plot)
    listed = list_runs(folder, sort)
    if plot is not None:
        plot_runs(listed, plot)
    if as_json:
        print_json([run.json() for run in listed])
        return
    _show(listed)
    if plot is not None:
        console().print(f"Validation curves: {plot}", markup=False, soft_wrap=True)


def _show(listed: "list[ListedRun]") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("run", "state", "step", "best score", "left", "size", "changed"):
        table.add_column(name, justify="right" if name in {"step", "size", "left"} else "left", no_wrap=name != "run")
    for run in listed:
        planned = "" if run.steps is None else f" / {run.steps:,}"
        score = "" if run.score is None else f"{run.metric} {run.score:.4g}"
        when = datetime.fromtimestamp(run.modified).strftime("%Y-%m-%d %H:%M")
        cells = (run.state, f"{run.step:,}{planned}", score, _left(run.seconds_left), _size(run.size), when)
        name = f"{run.name.rpartition('runs/')[0]}{run.about}" if run.about else run.name
        table.add_row(Text(name, overflow="fold"), *map(Text, cells))
    screen = console()
    screen.print(table)
    counts = {state: sum(run.state == state for run in listed) for state in dict.fromkeys(run.state for run in listed)}
    screen.print(", ".join(f"{count} {state}" for state, count in counts.items()) or "no training run here")
    for run in listed:
        if run.why and run.state == "failed":
            screen.print(f"{run.name}: {run.why}", markup=False, soft_wrap=True)


def _left(seconds: float | None) -> str:
    from regard.training.console import time_left

    return "" if seconds is None else time_left(seconds).removesuffix(" left")


def _size(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
