"""The command `variants`: list the modifications that can be made to a model."""

from typing import Annotated

import typer

from regard.cli.base import STUDY, AsJson, TrustCode, app, console, print_json


@app.command(rich_help_panel=STUDY)
def variants(
    name: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="List only these variants, with every field that they change."),
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="GROUP", help="List only this group, such as activation.")
    ] = None,
    base: Annotated[str, typer.Option(metavar="PRESET", help="Preset to modify.")] = "narang_base",
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """List the variants, which are modifications of a model from the literature.

    The table contains the row number in the table of Narang et al. 2021 (1 to
    52), the name and the group of each variant, the number of parameters of the
    modified base model, and a description that cites the paper.
    """
    from regard.presets import preset
    from regard.variants import described, select

    spec = preset(base)
    rows = [described(variant, spec, trust_code) for variant in select(name or [], group)]
    if as_json:
        print_json({"base": base, "variants": rows})
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("row", "name", "group", "parameters", "description"):
        right = heading in ("row", "parameters")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "description")
    for row in rows:
        count = f"{row['parameters']:,}" if row["parameters"] is not None else "-"
        number = "" if row["row"] is None else str(row["row"])
        table.add_row(number, row["name"], row["group"], count, Text(f"{row['about']} ({row['paper']})"))
    screen = console()
    screen.print(table)
    for row in rows:
        if row["refused"]:
            screen.print(f"- {row['name']}: {row['refused']}", markup=False)
        for law, reason in row["bends"].items():
            screen.print(f"- {row['name']} bends the law {law!r}: {reason}", markup=False)
        for change in row["changes"] if name else ():
            screen.print(f"  {change['path']}", markup=False)
    tail = "regard train --variant NAME, regard ablate --rows NAME,NAME"
    screen.print(f"{len(rows)} variants of {base}; {tail}", markup=False)
