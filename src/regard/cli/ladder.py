"""The command that climbs from what came before to the Transformer: ladder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.ablate import WIDE
from regard.cli.base import (
    STUDY,
    AsJson,
    Device,
    JsonPairs,
    Pairs,
    Quiet,
    RecipeFile,
    Source,
    Target,
    TrustCode,
    ValidSource,
    ValidTarget,
    app,
    console,
    print_json,
)
from regard.errors import SpecError

if TYPE_CHECKING:
    from regard.ablation.ladder import Ladder


@app.command(rich_help_panel=STUDY)
def ladder(
    recipe: RecipeFile = None,
    source: Source = None,
    target: Target = None,
    valid_source: ValidSource = None,
    valid_target: ValidTarget = None,
    tsv: Pairs = None,
    jsonl: JsonPairs = None,
    valid: Annotated[
        str | None, typer.Option(metavar="FILE", help="Held-out file of the same kind as --tsv, --jsonl.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="25 seconds a rung and 2 seeds: all of it in under 10 minutes on 2 cores.")
    ] = False,
    rungs: Annotated[
        str,
        typer.Option(
            "--rungs", metavar="RUNGS", help="all, or names between commas; the full Transformer is always the last."
        ),
    ] = "all",
    base: Annotated[
        str | None,
        typer.Option(metavar="PRESET", help="The full Transformer; chosen from the corpus if not given."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change its recipe: model.d_model=64. May be repeated."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="Runs of every rung; 3 if not given.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="The same training steps for every rung.")] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="The same seconds of training for every rung, however fast it is.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of translations: bleu (if not given), chrf, exact_match.")
    ] = None,
    search_rates: Annotated[
        bool, typer.Option("--search-rates", help="First look for every rung's learning rate, with the same effort.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs at once; one for each GPU, or for each core.")
    ] = None,
    out: Annotated[str, typer.Option(metavar="DIR", help="The folder of this ladder, new or old.")] = "runs/ladder",
    device: Device = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each run; the cores are shared out.")
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Begin no run that would end later: 90s, 30m, 2h. The same command goes on."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    trust_code: TrustCode = False,
) -> None:
    """Climb from what came before to the Transformer: every rung under one budget and one order of the data.

    What came before, the Transformer without one of its parts, and all of it: each with the same number of parameters
    (widths are solved for). Says of each how well it translates, by source length too, how fast it trains and how long
    its paths are. Without a text, on English numbers and dates in German. Killed or stopped, the same command goes on.
    The folder gets ladder.html, ladder.md, ladder.json and results.jsonl.
    """
    from regard.ablation import demo
    from regard.ablation.console import AblationConsole
    from regard.ablation.experiment import Settings
    from regard.ablation.ladder import QUICK_SECONDS, QUICK_SEEDS, select_rungs
    from regard.ablation.ladder import ladder as climb
    from regard.ablation.parallel import Resources
    from regard.ablation.plan import check_changes
    from regard.runs.options import seconds as parsed
    from regard.runs.request import check_request, request_from_options

    if seconds is not None and seconds <= 0:
        raise SpecError("--seconds", f"must be more than 0, not {seconds:g}")
    if steps is not None and seconds is not None:
        raise SpecError("--seconds", "says how long every rung is trained, and so does --steps; give one of them")
    if quick and steps is None and seconds is None:
        seconds = QUICK_SECONDS
    seeds = seeds if seeds is not None else QUICK_SEEDS if quick else 3
    settings = Settings("all", seeds, steps, seconds, "none", search_rates, metric, parsed(max_time))
    settings.check()
    select_rungs(rungs)
    folder = Path(out)
    files: dict[str, Any] = {
        "source": source,
        "target": target,
        "valid_source": valid_source,
        "valid_target": valid_target,
        "tsv": tsv,
        "jsonl": jsonl,
        "valid": valid,
    }
    given = {name: value for name, value in files.items() if value}
    if given or recipe is not None:
        wanted = request_from_options(**given, recipe=recipe, preset=base, changes=change or (), trust_code=trust_code)
        check_request(wanted)
    else:
        wanted = demo.ladder(folder / "text", base, change or ())
    check_changes(change or (), wanted, steps is not None or seconds is not None)
    view = AblationConsole(quiet=quiet or as_json)

    def ready() -> Any:
        if not given and recipe is None:
            demo.write(folder / "text")
        return wanted

    try:
        found = climb(ready, folder, rungs, settings, Resources(device, jobs, threads, trust_code), view.note)
    finally:
        view.close()
    if as_json:
        print_json(found.json())
    elif not quiet:
        _show(found, folder)


def _show(found: "Ladder", folder: Path) -> None:
    screen = console()
    if not screen.is_terminal:
        screen = console(width=WIDE)
    screen.print(found.table(narrow=screen.width < WIDE))
    screen.print(f"\n{found.title}", markup=False)
    screen.print(found.plot(), markup=False)
    screen.print(f"\n{found.title} by source length", markup=False)
    screen.print(found.length_table())
    for sentence in found.sentences():
        screen.print(sentence, markup=False)
    if (folder / "ladder.html").exists():
        screen.print(f"{folder / 'ladder.html'} has the pictures.", markup=False, soft_wrap=True)
