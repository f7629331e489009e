"""The command `check`: test a part of a model against the laws."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.base import STUDY, app, console
from regard.errors import SpecError, nearest

if TYPE_CHECKING:
    from regard.testing import Report


@app.command(rich_help_panel=STUDY)
def check(
    part: Annotated[
        str, typer.Argument(metavar="MODULE:PART", help="A spec class or instance, or the kind of a built-in part.")
    ],
    law: Annotated[list[str] | None, typer.Option("--law", help="Test only this law. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Test a part in tiny models, and report for each law whether the part keeps or breaks it.

    The exit code is 1 if a law is broken. MODULE may be in the current folder. It is
    imported, so check only code that you trust.

    \b
    causality   no output depends on a later token
    padding     padding changes neither outputs nor loss
    packing     outputs of packed sequences equal those of separate rows
    steps       decoding step by step equals one parallel pass
    ragged      decoding is correct for prompts of unequal length
    beams       the score of a beam equals that of its tokens in one pass
    batch       the output of a row does not depend on the other rows
    positions   order matters if and only if a part depends on it
    inspection  a trace changes no output; attention weights sum to one
    records     a model saved as JSON loads as the same model; wrong keys fail
    parameters  every parameter gets a gradient; counts are exact
    storage     no tensor is stored twice; saving and loading are exact
    kernels     every attention kernel equals the reference, or rejects the input
    fast        the fast form of a model gives the same results as the plain one
    compile     torch.compile traces the loss as one graph with an equal value
    build       other depths, widths and heads work, or an error names the field
    """  # noqa: D301  # click wants the character itself
    from regard.testing import LAWS
    from regard.testing import check as try_laws

    report = try_laws(_import_part(part), law or tuple(LAWS))
    if as_json:
        verdicts = [asdict(verdict) for verdict in report.verdicts]
        print(json.dumps({"part": report.part, "broken": len(report.broken), "verdicts": verdicts}, indent=2))
    else:
        _print_report(report)
    raise typer.Exit(1 if report.broken else 0)


def _import_part(name: str) -> Any:
    from regard.catalogue import PARTS
    from regard.tree import load

    if ":" in name:
        return load(name)
    if name not in PARTS:
        raise SpecError("", f"{name!r} is neither module:Part nor the kind of a built-in part; {nearest(name, PARTS)}")
    return PARTS[name]


def _print_report(report: "Report") -> None:
    from rich.table import Table
    from rich.text import Text

    marks = {"kept": "[green]kept[/]", "broken": "[bold red]BROKEN[/]", "bent": "[yellow]bent[/]"}
    models = list(dict.fromkeys(verdict.model for verdict in report.verdicts))
    table = Table(box=None, pad_edge=False)
    table.add_column("law")
    for model in models:
        table.add_column(Text(model))
    for law in dict.fromkeys(verdict.law for verdict in report.verdicts):
        row = {v.model: marks.get(v.outcome, "-") for v in report.verdicts if v.law == law}
        table.add_row(law, *(row.get(model, "") for model in models))
    screen = console()
    screen.print(table)
    for model, reason in {v.model: v.detail for v in report.verdicts if v.outcome == "refused"}.items():
        screen.print(f"- {model} was refused: {reason}", markup=False)
    for verdict in report.broken:
        screen.print(f"! {verdict.law} in {verdict.model}: {verdict.detail}", markup=False)
    kept = sum(verdict.outcome == "kept" for verdict in report.verdicts)
    screen.print(f"{report.part}: {kept} kept, {len(report.broken)} broken", markup=False)
