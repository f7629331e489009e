"""The command `bench`: compare the speed of regard with that of other libraries."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.base import STUDY, AsJson, Device, Quiet, app, console, print_json, set_threads, warn
from regard.errors import SpecError, nearest

if TYPE_CHECKING:
    from regard.bench.report import RaceReport

TASKS, DEVICES = ("train", "decode"), ("cpu", "cuda")
ENOUGH_ROUNDS = 10


@app.command(rich_help_panel=STUDY)
def bench(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to measure: train or decode.")],
    shape: Annotated[
        str, typer.Option(metavar="NAME", help="Model size: small, base or big; tiny is for trying out the command.")
    ] = "small",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Libraries to compare with, separated by commas: hf, ctranslate2, joeynmt, fairseq, xtransformers, "
            "torch. Default: all that are installed.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help=f"Number of rounds; a verdict needs at least {ENOUGH_ROUNDS}.")
    ] = ENOUGH_ROUNDS,
    smoothing: Annotated[float, typer.Option(metavar="X", help="Label smoothing of the training loss.")] = 0.1,
    device: Device = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads per library.")] = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare the speed of regard with that of other libraries.

    In each of many short rounds, every library runs the same model on the same
    sentences. Speed is measured in tokens per second, not counting padding. On
    a CPU, the seconds are CPU time; on a GPU, they are elapsed time. For each
    model, the command prints the ratio of its speed to that of the fastest
    other library: the median over the rounds, with a 95 % interval.
    """
    if task not in TASKS:
        raise SpecError("TASK", f"unknown task {task!r}; {nearest(task, TASKS)}")
    from regard.bench.peers import chosen

    names = None if against is None else [name.strip() for name in against.split(",") if name.strip()]
    if names == []:
        raise SpecError("--against", "names no library; leave it out to compare with all that are installed")
    peers, missing = chosen(names, task)
    from regard.bench.report import run
    from regard.bench.shapes import SHAPES
    from regard.runs.trained_model import choose_device

    if shape not in SHAPES:
        raise SpecError("--shape", f"unknown shape {shape!r}; {nearest(shape, SHAPES)}")
    if not 0.0 <= smoothing < 1.0:
        raise SpecError("--smoothing", f"must lie in [0, 1), not {smoothing}")
    where = choose_device(device)
    if where.type not in DEVICES:
        raise SpecError("--device", f"benchmarks run on {' or '.join(DEVICES)}, not on {where.type}")
    set_threads(threads)
    for peer in () if quiet else missing:
        warn(f"{peer.title} is not installed, so it is left out; {peer.install}")
    report = run(task, shape, peers, rounds, smoothing, where, (lambda _: None) if quiet else progress)
    if as_json:
        print_json(report.json() | {"missing": [peer.name for peer in missing]})
    else:
        _show(report)


def progress(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def _show(report: "RaceReport") -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in report.headings():
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for line in report.lines():
        table.add_row(*line)
    screen = console()
    screen.print(table)
    machine = report.machine
    where = machine.get("gpu") or f"{machine['cpu']}, threads: {machine['threads']}"
    screen.print(f"{report.task} {report.shape}, {report.rounds} rounds: {report.unit}", markup=False, soft_wrap=True)
    screen.print(f"{where}, torch {machine['versions']['torch']}", markup=False)
    if report.rounds < ENOUGH_ROUNDS:
        screen.print(f"needs at least {ENOUGH_ROUNDS} rounds for a verdict")
