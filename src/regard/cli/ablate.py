"""The command `ablate`: compare modifications of a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.base import STUDY, AsJson, Quiet, RecipeFile, console, print_json
from regard.cli.options import OnCluster, Runs, TextFiles, command, experiment_option, given
from regard.errors import SpecError

if TYPE_CHECKING:
    from regard.ablation.report import Report

WIDE = 140


@command(STUDY)
def ablate(
    files: TextFiles,
    runs: Runs,
    cluster: OnCluster,
    recipe: RecipeFile = None,
    rows: Annotated[
        str,
        experiment_option(
            "--rows",
            metavar="ROWS",
            help="Variants to compare: all, table (the 52 rows of Narang et al. 2021), a group such as activation, or "
            "names separated by commas. A variant of your own is named module:function.",
        ),
    ] = "all",
    variants: Annotated[
        list[str] | None,
        experiment_option("--variant", metavar="NAME", help="Apply this variant to the base model. Repeatable."),
    ] = None,
    seeds: Annotated[
        int, experiment_option(metavar="N", help="Number of seeds per variant; the base model has three times as many.")
    ] = 3,
    time: Annotated[
        str | None,
        experiment_option(
            "--time",
            metavar="TIME",
            help="Instead of --steps: train the base model for this long, e.g. 20s or 5m. Every variant is trained for "
            "as many steps as the base model.",
        ),
    ] = None,
    match: Annotated[
        str,
        experiment_option(
            help="What to keep equal between every variant and the base model: parameters, compute (FLOPs) or none. "
            "The feed-forward width of the variants is adjusted."
        ),
    ] = "none",
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder for the results (required). An interrupted ablation is continued."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure which modifications of a model help on your text.

    Every variant is the base model with one modification (see `regard variants`). All models are trained in the same
    way, each with several seeds. A statistical test decides whether a variant is better or worse than the base model.
    Without training text, a demo corpus of English numbers and dates with German translations is used.

    To continue after an interruption, run the same command again. The results are written to table.html, table.md,
    table.json and results.jsonl in the folder given by --out.
    """
    if out is None:
        raise SpecError("--out", "is missing; name the folder of this ablation, such as --out runs/ablation")
    from regard.ablation.ablate import ablate

    report = ablate(
        out,
        **files.keywords(),
        **given(runs),
        **given(cluster),
        recipe=recipe,
        rows=rows,
        variants=variants or (),
        seeds=seeds,
        time=time,
        match=match,
        quiet=quiet or as_json,
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
        screen.print(f"Loss curves and effects: {folder / 'table.html'}", markup=False, soft_wrap=True)
