"""The command `export`: convert a trained model to the format of another inference engine."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.base import SHIP, AsJson, Device, Quantize, TrustCode, app, print_json
from regard.cli.inference import RunArgument
from regard.cli.options import Average


@app.command(rich_help_panel=SHIP)
def export(
    run: RunArgument,
    to: Annotated[str, typer.Option(help="Format to convert to: ctranslate2.")] = "ctranslate2",
    quantize: Quantize = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder. Default: RUN/exports/ctranslate2-TYPE.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    average: Average = None,
    device: Device = "auto",
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Convert a trained model for another inference engine, and verify the result.

    regard and the other engine translate texts from the validation set. The
    number of equal outputs and the largest difference of log-probabilities are
    printed, and stored in regard.json. If a float32 or float16 export differs by
    more than rounding, the command fails (exit code 2) and leaves no files. If
    the engine does not support a part of the model, the error names this part.
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
