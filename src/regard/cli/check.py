"""The command `check`: test whether a part of a model keeps the laws of a Transformer, such as causality."""

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
        str,
        typer.Argument(
            metavar="MODULE:PART",
            help="The part to check: a class or instance of your own as module:name, or the name of a built-in part, "
            "such as rms_norm.",
        ),
    ],
    law: Annotated[
        list[str] | None, typer.Option("--law", help="Test only this law from the list above. Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Test a part of a model against the laws of a Transformer.

    The laws are tested on tiny models that contain the part. The exit code is 1 if a law is broken.
    MODULE may be a file in the current folder. It is imported, so check only code that you trust.

    \b
    causality   no output depends on a later token
    padding     padding changes neither outputs nor loss
    packing     outputs of sequences packed into one row equal those of separate rows
    steps       decoding token by token equals one parallel pass
    ragged      decoding is correct for prompts of unequal length
    beams       the score of a beam equals that of its tokens in one parallel pass
    batch       the output of a row does not depend on the other rows
    positions   token order matters if and only if a part declares that it does
    inspection  recorded attention is what the model used; recording changes nothing
    records     a model spec saved as JSON loads unchanged; misspelt keys are errors
    parameters  every parameter gets a gradient; parameter counts are exact
    storage     no tensor is stored twice; saved weights load exactly
    kernels     every attention kernel equals the reference, or refuses the input
    fast        fused kernels give the same results as plain PyTorch modules
    compile     torch.compile captures the loss as one graph, with an equal value
    build       other depths, widths and head counts work, or an error names the field
    """  # noqa: D301  # click needs the character itself
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
        raise SpecError("", f"{name!r} is neither module:name nor a built-in part; {nearest(name, PARTS)}")
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
        screen.print(f"- {model} cannot be built with this part: {reason}", markup=False)
    for verdict in report.broken:
        screen.print(f"! {verdict.law} in {verdict.model}: {verdict.detail}", markup=False)
    kept = sum(verdict.outcome == "kept" for verdict in report.verdicts)
    screen.print(f"{report.part}: {kept} kept, {len(report.broken)} broken", markup=False)
