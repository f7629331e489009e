"""The command that settles whether a change helps: ablate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.base import (
    STUDY,
    AsJson,
    Device,
    HeldOut,
    JsonPairs,
    LabelledText,
    Pairs,
    Quiet,
    RecipeFile,
    Source,
    Target,
    Text,
    TrustCode,
    ValidSource,
    ValidTarget,
    app,
    console,
    print_json,
)
from regard.errors import SpecError

if TYPE_CHECKING:
    from regard.ablation.report import Report

WIDE = 140


@app.command(rich_help_panel=STUDY)
def ablate(
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
    rows: Annotated[
        str,
        typer.Option(
            "--rows", metavar="ROWS", help="all, table (the 52 rows), a group such as activation, or names: a,b,c."
        ),
    ] = "all",
    base: Annotated[
        str | None,
        typer.Option(metavar="PRESET", help="The model that is changed; chosen from the corpus if not given."),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="A modification that the base has already. May be repeated.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Change the base's recipe: model.d_model=64. May be repeated."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Runs of every row; the base has three times as many.")] = 3,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Training steps of every run.")] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", metavar="TIME", help="As many steps as the base makes in this time: 20s, 5m."),
    ] = None,
    match: Annotated[
        str, typer.Option(help="Give every row the base's size by its hidden width: none, parameters or compute.")
    ] = "none",
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Beside the loss: bleu, chrf, exact_match, rouge1, rougeL, perplexity."),
    ] = None,
    search_rates: Annotated[
        bool, typer.Option("--search-rates", help="First look for every row's learning rate, with the same effort.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs at once; one for each GPU, or for each core.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="The folder of this ablation, new or old.")] = None,
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
    """Say what each modification is worth on your text: better, worse, or no measurable difference.

    Every row is the base with one change (regard variants), trained in the same way over several seeds. Without a
    text, on English numbers and dates in German. A run that is done is never repeated: killed or stopped, the same
    command goes on. The folder gets table.html, table.md, table.json and results.jsonl.
    """
    if out is None:
        raise SpecError("--out", "is missing; name the folder of this ablation, such as --out runs/ablation")
    from regard.ablation.ablate import ablate

    report = ablate(
        out,
        recipe=recipe,
        source=source,
        target=target,
        valid_source=valid_source,
        valid_target=valid_target,
        tsv=tsv or (),
        jsonl=jsonl or (),
        text=text or (),
        labelled=labelled or (),
        valid=valid,
        rows=rows,
        base=base,
        variants=variant or (),
        changes=change or (),
        seeds=seeds,
        steps=steps,
        time=time,
        match=match,
        metric=metric,
        search_rates=search_rates,
        jobs=jobs,
        device=device,
        threads=threads,
        max_time=max_time,
        quiet=quiet or as_json,
        trust_code=trust_code,
    )
    _show(report, Path(out), as_json, quiet)


def _show(report: "Report", folder: Path, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(report.json())
    if as_json or quiet:
        return
    screen = console()
    if not screen.is_terminal:
        screen = console(width=WIDE)
    screen.print(report.table(narrow=screen.width < WIDE))
    for sentence in report.sentences():
        screen.print(sentence, markup=False)
    if (folder / "table.html").exists():
        screen.print(f"{folder / 'table.html'} has the curves and the effects.", markup=False, soft_wrap=True)
