"""The commands that train a model (`demo`, `train`, `resume`), and `cache`, which prints or clears the text cache."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.base import (
    TRAIN,
    AsJson,
    Device,
    Plain,
    Quiet,
    RecipeFile,
    Threads,
    TrustCode,
    compute_option,
    print_json,
    set_threads,
)
from regard.cli.options import TextFiles, command
from regard.errors import SpecError

if TYPE_CHECKING:
    from regard.data.cache import Entry
    from regard.runs.trained_model import TrainedModel
    from regard.training.trainer import Outcome

# Constructors of options, one for each panel of the help.
model_option = partial(typer.Option, rich_help_panel="Model and recipe")
budget_option = partial(typer.Option, rich_help_panel="Steps and time")

MaxTime = Annotated[
    str | None,
    budget_option(
        metavar="TIME", help="Save and stop after this time, such as 90s, 30m or 2h; continue with `regard resume`."
    ),
]
Gpus = Annotated[
    int | None,
    compute_option(min=1, metavar="N", help="Train on N GPUs of this machine, with one process for each."),
]
Ranks = Annotated[
    int | None,
    compute_option(min=1, metavar="N", help="Train in N processes on the CPU, which divide the batches of every step."),
]


@command(TRAIN)
def demo(
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="New folder for the training run.")] = None,
    language: Annotated[str, typer.Option(help="Target language: de, fr, es, it, nl, ...")] = "de",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of training steps. Fewer steps are faster but give a worse model.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a small Transformer on this machine in about two minutes.

    The model learns to translate English numbers, dates, times and amounts of money into German. It is then tested on
    values that do not occur in the training text in any form, and its attention weights are shown.
    """
    from regard.demo.run import run

    result = run(out, language, steps, seed, quiet or as_json)
    if as_json:
        print_json(result)


@command(TRAIN)
def train(
    files: TextFiles,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel="Training data",
            help="Task, such as summarization. Default: translation for pairs, language_model for --text, "
            "classification for --labelled.",
        ),
    ] = None,
    recipe: RecipeFile = None,
    out: Annotated[str | None, typer.Option(metavar="RUN", help="New folder for the training run (required).")] = None,
    start: Annotated[
        str | None, model_option("--from", metavar="RUN", help="Fine-tune: start from the weights of this run.")
    ] = None,
    preset: Annotated[
        str | None,
        model_option(metavar="NAME", help="Model, as listed by `regard show`. Default: chosen to suit the text."),
    ] = None,
    variants: Annotated[
        list[str] | None,
        model_option(
            "--variant",
            metavar="NAME",
            help="Modification of the model, as listed by `regard variants`, or module:function for one of your own "
            "(with --trust-code). Repeatable.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        model_option(
            "--set",
            metavar="PATH=VALUE",
            help="Change the recipe, such as train.seed=2 or model.decoder.depth=3. Repeatable.",
        ),
    ] = None,
    steps: Annotated[int | None, budget_option(metavar="N", help="Number of training steps (train.steps).")] = None,
    time: Annotated[
        str | None,
        budget_option(
            "--time",
            metavar="TIME",
            help="Total training time, such as 5m or 2h. Model, epochs and learning-rate schedule are chosen to fit.",
        ),
    ] = None,
    max_time: MaxTime = None,
    device: Device = "auto",
    gpus: Gpus = None,
    ranks: Ranks = None,
    threads: Threads = None,
    plain: Plain = False,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Do not use the cache of prepared training text (see `regard cache`)."),
    ] = False,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a model and its tokenizer on your own text files.

    Settings that you do not give are chosen to suit the text, and printed with their reasons. Everything is written to
    one folder, the training run. Pass this folder to `regard translate`, `generate`, `classify` and `evaluate` to use
    the model, or to `regard resume` to continue training that was stopped.
    """
    if out is None:
        raise SpecError("--out", "is missing; name the new folder to train into, such as --out runs/first")
    from regard.runs.options import seconds
    from regard.runs.request import check_request, request_from_options
    from regard.runs.train import TrainingOptions, start_run

    request = request_from_options(
        **files.keywords(),
        task=task,
        recipe=recipe,
        preset=preset,
        variants=variants or (),
        changes=changes or (),
        start=start,
        steps=steps,
        time=time,
        trust_code=trust_code,
    )
    options = TrainingOptions(device, seconds(max_time), quiet or as_json, trust_code, not no_cache, plain)
    check_request(request)
    _start_processes(gpus, ranks, device)
    set_threads(threads, "train", device)  # on first use, this measures the speed of the machine for some seconds
    with _silent_after_another():
        run, outcome = start_run(request, out, options)
    _finish(run, outcome, as_json, quiet)


@command(TRAIN)
def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a training run that was stopped.")],
    max_time: MaxTime = None,
    device: Device = "auto",
    gpus: Gpus = None,
    ranks: Ranks = None,
    threads: Threads = None,
    plain: Plain = False,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Continue training that was interrupted, as if it had not stopped.

    Training may have been killed, interrupted by Ctrl-C or stopped by a time limit. If the last checkpoint is damaged,
    training continues from the one before it.
    """
    _start_processes(gpus, ranks, device)
    set_threads(threads, "train", device, Path(run))
    from regard.runs.options import seconds
    from regard.runs.train import TrainingOptions, resume_run

    options = TrainingOptions(device, seconds(max_time), quiet or as_json, trust_code, plain=plain)
    with _silent_after_another():
        trained, outcome = resume_run(run, options)
    _finish(trained, outcome, as_json, quiet)


@command(TRAIN)
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Empty the cache; training runs keep their data.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print or clear the cache of prepared training text.

    `regard train` stores tokenized text in the cache, so that the same text is tokenized only once, even if the file is
    renamed. The cache also contains compiled code, and measurements of this machine, such as the fastest number of
    threads.

    The environment variable REGARD_CACHE sets the folder of the cache. The default is the folder regard in the system's
    cache folder (XDG_CACHE_HOME or ~/.cache). REGARD_CACHE_SIZE sets the maximum size (default: 20GB; with 0, nothing
    is stored). Above the maximum size, the least recently used entries are removed.
    """
    from regard.data.cache import FOLDER, SIZE, Cache

    store = Cache.default()
    removed = store.entries() if clear else []
    if clear:
        store.clear()
    entries = store.entries()
    if as_json:
        total = sum(entry.size for entry in entries)
        about: dict[str, Any] = {"folder": str(store.folder), "most": store.limit, "size": total}
        print_json(about | {"entries": [asdict(entry) for entry in entries], "removed": len(removed)})
        return
    if clear:
        print(f"removed {_sizes(removed)}")
    print(f"{store.folder} ({FOLDER}): {_sizes(entries)}, at most {store.limit / 1e9:g} GB ({SIZE})")
    for entry in entries:
        used = strftime("%Y-%m-%d %H:%M", localtime(entry.used))
        print(f"  {entry.size / 1e6:10.1f} MB  used {used}  {', '.join(entry.files)}")


def _sizes(entries: "Sequence[Entry]") -> str:
    return f"{len(entries)} text{'' if len(entries) == 1 else 's'}, {sum(entry.size for entry in entries) / 1e6:.1f} MB"


def _start_processes(gpus: int | None, ranks: int | None, device: str) -> None:
    """Run this command in several processes, if an option requests that, and exit when they have ended."""
    if gpus is None and ranks is None:
        return
    from regard.training.parallel.launch import check_launch, launch

    check_launch(gpus, ranks, device)
    words = [*_without(sys.argv[1:], ("--gpus", "--ranks")), "--device", "cpu" if gpus is None else "cuda"]
    raise typer.Exit(launch(words, gpus or ranks or 1))


def _without(words: "Sequence[str]", options: tuple[str, ...]) -> list[str]:
    """Return the words of a command line without these options and their values."""
    kept, skipped = [], False
    for word in words:
        named = word.partition("=")[0] in options
        if not skipped and not named:
            kept.append(word)
        skipped = named and "=" not in word
    return kept


@contextmanager
def _silent_after_another() -> "Iterator[None]":
    """Exit without a message if another process of the group has failed, which prints the reason."""
    from regard.training.parallel.joining import OtherRankError

    try:
        yield
    except OtherRankError:
        raise typer.Exit(2) from None


def _finish(run: "TrainedModel", outcome: "Outcome", as_json: bool, quiet: bool) -> None:
    from regard.training.parallel.joining import launched_rank

    quiet, as_json = quiet or launched_rank() > 0, as_json and launched_rank() == 0
    if as_json:
        print_json(summary(run, outcome))
    elif not quiet:
        print(f"regard {run.command} {run.path}")
    if not outcome.finished:
        raise typer.Exit(outcome.exit_code)


def summary(run: "TrainedModel", outcome: "Outcome") -> dict[str, Any]:
    """Return the summary of a training run for JSON: outcome, scores, model size, and warnings about bad output."""
    from regard.evaluation.baselines import stored
    from regard.training import degenerate
    from regard.training.checkpoint import RunFolder

    return {
        "run": str(run.path),
        "finished": outcome.finished,
        "why": outcome.why,
        "step": outcome.step,
        "parameters": run.parameters,
        "scores": run.scores,
        "baselines": [asdict(baseline) for baseline in stored(RunFolder(run.path))],
        "warnings": degenerate.warnings(run.scores),
        "weights_sha256": run.weights_sha256,
    }
