"""Commands that train: demo, train, resume; and the cache that they use."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.base import (
    TRAIN,
    AsJson,
    Device,
    HeldOut,
    JsonPairs,
    LabelledText,
    Pairs,
    Plain,
    Quiet,
    RecipeFile,
    Source,
    Target,
    Text,
    Threads,
    TrustCode,
    ValidSource,
    ValidTarget,
    app,
    print_json,
    set_threads,
)
from regard.errors import SpecError

if TYPE_CHECKING:
    from regard.data.cache import Entry
    from regard.runs.trained_model import TrainedModel
    from regard.training.trainer import Outcome

MaxTime = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Save and stop after this long: 90s, 30m, 2h. regard resume goes on later."),
]
TimeBudget = Annotated[
    str | None,
    typer.Option(
        "--time",
        metavar="TIME",
        help="Time for the whole run: 5m, 2h. Model, passes and learning rate schedule are planned to end with it.",
    ),
]


@app.command(rich_help_panel=TRAIN)
def demo(
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Keep the run in this new folder.")] = None,
    language: Annotated[str, typer.Option(help="The language to translate into: de, fr, es, it, nl, ...")] = "de",
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; fewer are faster and worse.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another run.")] = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a small Transformer in front of you, on this machine, in about two minutes.

    It learns to say English numbers, dates, times and amounts of money in German, is tested on values it has never
    seen in any form, and shows where it looked.
    """
    from regard.demo.run import run

    result = run(out, language, steps, seed, quiet or as_json)
    if as_json:
        print_json(result)


@app.command(rich_help_panel=TRAIN)
def train(
    recipe: RecipeFile = None,
    source: Source = None,
    target: Target = None,
    valid_source: ValidSource = None,
    valid_target: ValidTarget = None,
    tsv: Pairs = None,
    jsonl: JsonPairs = None,
    text: Text = None,
    labelled: LabelledText = None,
    valid: HeldOut = None,
    out: Annotated[str | None, typer.Option(metavar="RUN", help="The new folder to train into.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="A model by name (regard show); chosen from the corpus if not given.")
    ] = None,
    variant: Annotated[list[str] | None, typer.Option(help="A modification by name. May be repeated.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change the recipe: train.steps=1000, model.decoder.depth=3."),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="RUN", help="Go on from this run with new text.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    plain: Plain = False,
    time: TimeBudget = None,
    max_time: MaxTime = None,
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache",
            help="Prepare the text anew and keep nothing. Otherwise a text that was prepared before is taken from the "
            "cache; regard cache says where it is, and clears it.",
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    trust_code: TrustCode = False,
) -> None:
    """Train a model on your own text files, with its tokenizer inside, in one command.

    Everything that you do not say is chosen from the corpus, and said. All goes into one folder, which
    regard translate, generate, classify and evaluate use, and regard resume continues.
    """
    if out is None:
        raise SpecError("--out", "is missing; name the new folder to train into, such as --out runs/first")
    from regard.runs.request import check_request, request_from_options
    from regard.runs.train import TrainingOptions, start_run

    wanted = request_from_options(
        source=source,
        target=target,
        valid_source=valid_source,
        valid_target=valid_target,
        tsv=tsv or (),
        jsonl=jsonl or (),
        text=text or (),
        labelled=labelled or (),
        valid=valid,
        recipe=recipe,
        preset=preset,
        variants=variant or (),
        changes=change or (),
        start=start,
        time=seconds(time, "--time"),
        trust_code=trust_code,
    )
    options = TrainingOptions(device, seconds(max_time), quiet or as_json, trust_code, not no_cache, plain)
    check_request(wanted)
    set_threads(threads, "train", device)  # which may take some seconds, the first time
    run, outcome = start_run(wanted, out, options)
    _finish(run, outcome, as_json, quiet)


@app.command(rich_help_panel=TRAIN)
def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run that was stopped.")],
    device: Device = "auto",
    threads: Threads = None,
    plain: Plain = False,
    max_time: MaxTime = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    trust_code: TrustCode = False,
) -> None:
    """Go on exactly where a run stopped, as if it had not: killed, interrupted, or out of time."""
    set_threads(threads, "train", device, Path(run))
    from regard.runs.train import TrainingOptions, resume_run

    options = TrainingOptions(device, seconds(max_time), quiet or as_json, trust_code, plain=plain)
    found, outcome = resume_run(run, options)
    _finish(found, outcome, as_json, quiet)


@app.command(rich_help_panel=TRAIN)
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it. Runs keep their data.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say where prepared text is kept, how much of it there is, or clear it.

    regard train takes a text that it has prepared before from here, whatever its name: it is known by its content. The
    folder is REGARD_CACHE, or regard in the folder that the system has for caches (XDG_CACHE_HOME, ~/.cache). It holds
    at most REGARD_CACHE_SIZE (20GB if not set; 0: keep nothing); what was not used for longest is removed first. What
    was measured of this machine, such as how many threads it does best with, and compiled for it is kept there too.
    """
    from regard.data.cache import FOLDER, SIZE, Cache

    found = Cache.usual()
    removed = found.entries() if clear else []
    if clear:
        found.clear()
    entries = found.entries()
    if as_json:
        total = sum(entry.size for entry in entries)
        about: dict[str, Any] = {"folder": str(found.folder), "most": found.most, "size": total}
        print_json(about | {"entries": [asdict(entry) for entry in entries], "removed": len(removed)})
        return
    if clear:
        print(f"removed {_sizes(removed)}")
    print(f"{found.folder} ({FOLDER}): {_sizes(entries)}, at most {found.most / 1e9:g} GB ({SIZE})")
    for entry in entries:
        used = strftime("%Y-%m-%d %H:%M", localtime(entry.used))
        print(f"  {entry.size / 1e6:10.1f} MB  used {used}  {', '.join(entry.files)}")


def _sizes(entries: "Sequence[Entry]") -> str:
    return f"{len(entries)} text{'' if len(entries) == 1 else 's'}, {sum(entry.size for entry in entries) / 1e6:.1f} MB"


def _finish(run: "TrainedModel", outcome: "Outcome", as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(summary(run, outcome))
    elif not quiet:
        use = {"translation": "translate", "language_model": "generate", "classification": "classify"}
        print(f"regard {use[run.objective.kind]} {run.path}")
    if not outcome.finished:
        raise typer.Exit(130 if outcome.why.startswith("interrupted") else 0)


def summary(run: "TrainedModel", outcome: "Outcome") -> dict[str, Any]:
    """A run in a few numbers, and what its user should know."""
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


def seconds(text: str | None, option: str = "--max-time") -> float | None:
    """`90`, `90s`, `30m` or `2h` in seconds, as an option is given."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not found or float(found[1]) == 0:
        raise SpecError(option, f"{text!r} is no time; write 90s, 30m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]
