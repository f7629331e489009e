"""The command `bench`: compare the speed of regard with that of other libraries, or measure long sequences."""

import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.ablate import WIDE
from regard.cli.base import STUDY, AsJson, Device, Quiet, console, print_json, set_threads, warn
from regard.cli.options import command, given
from regard.errors import SpecError, nearest

if TYPE_CHECKING:
    from regard.bench.length import LengthReport
    from regard.bench.report import RaceReport

TASKS, DEVICES = ("train", "decode", "length"), ("cpu", "cuda")
ENOUGH_ROUNDS = 10
SHAPE, SMOOTHING = "small", 0.1

race_option = partial(typer.Option, rich_help_panel="Comparison with other libraries: train and decode")
length_option = partial(typer.Option, rich_help_panel="Long sequences: length")


@dataclass(frozen=True)
class Races:
    """The options of `bench train` and `bench decode`."""

    shape: Annotated[
        str | None,
        race_option(
            metavar="NAME",
            help=f"Model size: small, base or big; tiny is for trying out the command. Default: {SHAPE}.",
        ),
    ] = None
    against: Annotated[
        str | None,
        race_option(
            metavar="NAMES",
            help="Libraries to compare with, separated by commas: hf, ctranslate2, joeynmt, fairseq, xtransformers, "
            "torch. Default: all that are installed.",
        ),
    ] = None
    smoothing: Annotated[
        float | None, race_option(metavar="X", help=f"Label smoothing of the training loss. Default: {SMOOTHING}.")
    ] = None


@dataclass(frozen=True)
class Lengths:
    """The options of `bench length`."""

    longest: Annotated[
        int | None,
        length_option(
            "--max", metavar="T", help="Tokens in the longest sequence. Default: 8192 on a CPU, 65536 on a GPU."
        ),
    ] = None
    shortest: Annotated[
        int | None,
        length_option("--min", metavar="T", help="Tokens in the shortest sequence. Default: 256."),
    ] = None
    models: Annotated[
        str | None,
        length_option(
            metavar="NAMES", help="Models to measure, separated by commas, such as full,window. Default: all."
        ),
    ] = None
    limit: Annotated[
        float | None,
        length_option(
            metavar="S",
            help="Skip a model at lengths at which a training step would take more than S seconds. Default: 4 on "
            "a CPU, 10 on a GPU.",
        ),
    ] = None
    max_time: Annotated[
        str | None,
        length_option(
            "--max-time",
            metavar="TIME",
            help="Time limit, such as 90s or 8m. After it, no more models are measured or trained, and the results so "
            "far are printed. The longest sequences come last.",
        ),
    ] = None
    recall: Annotated[
        bool | None,
        length_option(
            "--recall",
            help="Also train a tiny version of each model on associative recall, and report its accuracy by distance. "
            "Takes about 40 minutes on a CPU.",
        ),
    ] = None
    recall_only: Annotated[
        bool | None,
        length_option("--recall-only", help="Measure only the accuracy on associative recall, not time and memory."),
    ] = None
    steps: Annotated[
        int | None,
        length_option(min=1, metavar="N", help="Training steps of --recall. Default: 1800."),
    ] = None
    plot: Annotated[
        Path | None,
        length_option(metavar="FILE", help="Plot time, memory and accuracy into this .png, .svg or .pdf file."),
    ] = None


@command(STUDY)
def bench(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to measure: train, decode or length.")],
    races: Races,
    lengths: Lengths,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"Number of rounds. Default: {ENOUGH_ROUNDS}, the least for a comparison; for length, 3 on a CPU and "
            "5 on a GPU.",
        ),
    ] = None,
    device: Device = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads per library.")] = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare the speed of regard with that of other libraries, or measure what long sequences cost.

    train, decode: in each of many short rounds, every library runs the same model on the same sentences. Speed is
    measured in tokens per second, not counting padding. On a CPU, these are seconds of CPU time; on a GPU, of elapsed
    time. For each model, the command prints the ratio of its speed to that of the fastest other library: the median
    over the rounds, with a 95 % interval.

    length: time, peak memory and FLOPs of a training step on sequences of 256, 512, ... tokens, for models that differ
    only in the layer that mixes tokens (recurrence, convolution, many kinds of attention, the delta rule), and the
    exponents b of time = a * length^b and of memory. With --recall, also the accuracy of recalling the value of a key
    by its distance.
    """
    if task not in TASKS:
        raise SpecError("TASK", f"unknown task {task!r}; {nearest(task, TASKS)}")
    unused, other = (races, "tasks train and decode") if task == "length" else (lengths, "task length")
    for name in given(unused):
        option = {"longest": "max", "shortest": "min"}.get(name, name.replace("_", "-"))
        raise SpecError(f"--{option}", f"applies only to the {other}; leave it out")
    report = (lambda _: None) if quiet else progress
    if task == "length":
        _length(lengths, rounds, device, threads, as_json, report)
    else:
        _race(task, races, rounds or ENOUGH_ROUNDS, device, threads, as_json, quiet, report)


def _device(device: str) -> Any:
    from regard.runs.trained_model import choose_device

    where = choose_device(device)
    if where.type not in DEVICES:
        raise SpecError("--device", f"benchmarks run on {' or '.join(DEVICES)}, not on {where.type}")
    return where


def _names(option: str, names: str | None, what: str) -> list[str] | None:
    """Return the names in a comma-separated list, or None if the option is not given."""
    found = None if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if found == []:
        raise SpecError(option, f"names no {what}")
    return found


def _race(
    task: str, races: Races, rounds: int, device: str, threads: int, as_json: bool, quiet: bool, progress: Any
) -> None:
    from regard.bench.peers import chosen

    names = _names("--against", races.against, "library; leave it out to compare with all that are installed")
    peers, missing = chosen(names, task)
    from regard.bench.report import run
    from regard.bench.shapes import SHAPES

    shape = races.shape or SHAPE
    if shape not in SHAPES:
        raise SpecError("--shape", f"unknown shape {shape!r}; {nearest(shape, SHAPES)}")
    smoothing = SMOOTHING if races.smoothing is None else races.smoothing
    if not 0.0 <= smoothing < 1.0:
        raise SpecError("--smoothing", f"must lie in [0, 1), not {smoothing}")
    where = _device(device)
    set_threads(threads)
    for peer in () if quiet else missing:
        warn(f"{peer.title} is not installed, so it is left out; {peer.install}")
    report = run(task, shape, peers, rounds, smoothing, where, progress)
    if as_json:
        print_json(report.json() | {"missing": [peer.name for peer in missing]})
    else:
        _show(report)


def _length(lengths: Lengths, rounds: int | None, device: str, threads: int, as_json: bool, progress: Any) -> None:
    from regard.bench.length import run, work_on
    from regard.bench.length_plot import check_plot, plot
    from regard.bench.long_models import select
    from regard.bench.recall import RecallTask
    from regard.runs.options import seconds

    recalls = bool(lengths.recall or lengths.recall_only)
    measured = {"--min": lengths.shortest, "--max": lengths.longest, "--limit": lengths.limit, "--rounds": rounds}
    for option, value in measured.items():
        if lengths.recall_only and value is not None:
            raise SpecError(option, "has no effect with --recall-only; leave one of the two out")
    if lengths.steps is not None and not recalls:
        raise SpecError("--steps", "is the number of training steps of --recall; give --recall, or leave it out")
    models = select(_names("--models", lengths.models, "model; leave it out to measure all of them"))
    if lengths.plot is not None:
        check_plot(lengths.plot)
    where = _device(device)
    work = work_on(where, lengths.longest, lengths.limit, rounds, lengths.shortest)
    set_threads(threads)
    if lengths.max_time is not None:
        work = replace(work, deadline=time.monotonic() + (seconds(lengths.max_time) or 0.0))
    task = RecallTask(steps=lengths.steps or RecallTask.steps) if recalls else None
    report = run(models, work, task, progress, costs=not lengths.recall_only)
    if lengths.plot is not None:
        plot(report.json(), lengths.plot)
    if as_json:
        print_json(report.json())
    else:
        _show_lengths(report, lengths.plot)


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
    screen.print(f"{report.task} {report.shape}, {report.rounds} rounds: {report.unit}", markup=False, soft_wrap=True)
    screen.print(_machine(report.machine), markup=False)
    if report.rounds < ENOUGH_ROUNDS:
        screen.print(f"needs at least {ENOUGH_ROUNDS} rounds for a verdict")


def _machine(machine: Any) -> str:
    where = machine.get("gpu") or f"{machine['cpu']}, threads: {machine['threads']}"
    return f"{where}, torch {machine['versions']['torch']}"


def _show_lengths(report: "LengthReport", picture: Path | None) -> None:
    from rich.table import Table

    from regard.bench.length_tables import tables

    screen = console()
    if not screen.is_terminal:
        screen = console(width=WIDE)
    for title, (headings, *lines) in tables(report.json()):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        screen.print(table)
        screen.print()
    for sentence in report.failures():
        screen.print(sentence, markup=False)
    if report.rows:
        screen.print(f"{report.unit[0].upper()}{report.unit[1:]}.", markup=False)
    screen.print(_machine(report.machine), markup=False)
    if picture is not None:
        screen.print(f"Plot: {picture}", markup=False, soft_wrap=True)
