"""The command `compare`: compare several training runs in a table."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.base import STUDY, AsJson, TrustCode, console, print_json
from regard.cli.options import command


@command(STUDY)
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Folders of two or more training runs.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the validation curves into this .png, .svg or .html file.")
    ] = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Compare training runs with each other.

    The table shows the differences between the recipes, and the size, validation curve, best scores, speed and training
    time of each model. For a run that is still training, the values logged so far are used.
    """
    from regard.runs.compare import compare as compare_runs

    comparison = compare_runs(*runs, trust_code=trust_code)
    if plot is not None:
        comparison.plot(plot)
    if as_json:
        print_json(comparison.json())
        return
    screen = console()
    screen.print(comparison.table())
    if plot is not None:
        screen.print(f"Validation curves: {plot}", markup=False, soft_wrap=True)
