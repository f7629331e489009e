"""The commands `demo`, `train` and `resume`, and `cache` for the cache that they use."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.base import TRAIN, AsJson, Device, Plain, Quiet, RecipeFile, Threads, TrustCode, print_json, set_threads
from regard.cli.options import TextFiles, command
from regard.errors import SpecError

if TYPE_CHECKING:
    from regard.data.cache import Entry
    from regard.runs.trained_model import TrainedModel
    from regard.training.trainer import Outcome

# Options by panel of the help.
model_option = partial(typer.Option, rich_help_panel="Model and recipe")
budget_option = partial(typer.Option, rich_help_panel="Steps and time")

MaxTime = Annotated[
    str | None,
    budget_option(
        metavar="TIME", help="Save and stop after this time, such as 90s, 30m or 2h; continue with `regard resume`."
    ),
]


@command(TRAIN)
def demo(
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Save the run in this new folder.")] = None,
    language: Annotated[str, typer.Option(help="Target language: de, fr, es, it, nl, ...")] = "de",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of training steps. Fewer steps are faster but give a worse model.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a small Transformer on this machine in about two minutes, and show its progress.

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
    recipe: RecipeFile = None,
    out: Annotated[str | None, typer.Option(metavar="RUN", help="The new folder to train into (required).")] = None,
    start: Annotated[
        str | None, model_option("--from", metavar="RUN", help="Start from the weights of this run.")
    ] = None,
    preset: Annotated[
        str | None,
        model_option(metavar="NAME", help="A model listed by `regard show`. Default: chosen to suit the text."),
    ] = None,
    variants: Annotated[
        list[str] | None,
        model_option(
            "--variant",
            metavar="NAME",
            help="A modification listed by `regard variants`, or your own as module:function with --trust-code. "
            "Repeatable.",
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
            help="Time budget, such as 5m or 2h, to which the model, epochs and learning-rate schedule are fitted.",
        ),
    ] = None,
    max_time: MaxTime = None,
    device: Device = "auto",
    threads: Threads = None,
    plain: Plain = False,
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache", help="Do not read prepared text from the cache or store it there (see `regard cache`)."
        ),
    ] = False,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a model on your own text files, with its tokenizer, in one command.

    Settings that you do not give are chosen to suit the text, and printed with their reasons. Everything is written to
    one folder, which `regard translate`, `generate`, `classify` and `evaluate` use. `regard resume` continues a run
    that was stopped.
    """
    if out is None:
        raise SpecError("--out", "is missing; name the new folder to train into, such as --out runs/first")
    from regard.runs.options import seconds
    from regard.runs.request import check_request, request_from_options
    from regard.runs.train import TrainingOptions, start_run

    request = request_from_options(
        **files.keywords(),
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
    set_threads(threads, "train", device)  # the first call measures the machine for some seconds
    run, outcome = start_run(request, out, options)
    _finish(run, outcome, as_json, quiet)


@command(TRAIN)
def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run that was stopped.")],
    max_time: MaxTime = None,
    device: Device = "auto",
    threads: Threads = None,
    plain: Plain = False,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run that was killed, interrupted or out of time, exactly as if it had never stopped."""
    set_threads(threads, "train", device, Path(run))
    from regard.runs.options import seconds
    from regard.runs.train import TrainingOptions, resume_run

    options = TrainingOptions(device, seconds(max_time), quiet or as_json, trust_code, plain=plain)
    trained, outcome = resume_run(run, options)
    _finish(trained, outcome, as_json, quiet)


@command(TRAIN)
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Empty the cache; existing runs keep their data.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print where prepared text is cached and how large it is, or clear the cache.

    `regard train` stores prepared text in the cache and does not prepare the same text again, even if the file has
    another name. The folder of the cache is REGARD_CACHE, or by default the folder regard in the cache folder of the
    system (XDG_CACHE_HOME, ~/.cache). The size limit is REGARD_CACHE_SIZE (default: 20GB; 0 stores nothing). The least
    recently used entry is removed first. The cache also contains compiled code and measurements of this machine, such
    as the best number of threads.
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


def _finish(run: "TrainedModel", outcome: "Outcome", as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(summary(run, outcome))
    elif not quiet:
        print(f"regard {run.command} {run.path}")
    if not outcome.finished:
        raise typer.Exit(130 if outcome.why.startswith("interrupted") else 0)


def summary(run: "TrainedModel", outcome: "Outcome") -> dict[str, Any]:
    """Return the JSON summary of a run: outcome, scores, size, SHA-256, and warnings about degenerate output."""
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
