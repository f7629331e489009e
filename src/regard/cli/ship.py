"""Commands that ship a run: export."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.base import SHIP, AsJson, Device, Quantize, TrustCode, app, print_json
from regard.cli.use import Average, RunArgument


@app.command(rich_help_panel=SHIP)
def export(
    run: RunArgument,
    to: Annotated[str, typer.Option(help="The engine to write for: ctranslate2.")] = "ctranslate2",
    quantize: Quantize = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to; RUN/exports/ctranslate2-TYPE if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an export that is there already.")] = False,
    average: Average = None,
    device: Device = "auto",
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Write a run for another engine, and check that it says the same there before calling it done.

    Texts of the run's validation set go through both; how many outputs agree and the largest difference of
    log-probabilities are printed and kept in regard.json. A float export that differs by more than rounding is an error
    (exit code 2), and nothing is left behind. What the other engine cannot express is refused by name.
    """
    from regard.inference.export import Check, sentence
    from regard.runs.trained_model import load

    exported = load(run, device, average, trust_code=trust_code).export(to, quantize, out, force)
    if as_json:
        print_json({"path": str(exported.path), **exported.record})
        return
    size = sum(path.stat().st_size for path in exported.path.iterdir())
    print(f"{exported.path}: {exported.record['quantize']}, {size / 1e6:.1f} MB")
    print(sentence(Check(**exported.record["check"])))
