"""The command `compare`: show several runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.base import STUDY, AsJson, TrustCode, console, print_json
from regard.cli.options import command


@command(STUDY)
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="The folders of two or more runs.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the validation curves: .png, .svg or .html.")
    ] = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: recipes (only what differs), sizes, validation curves, best scores, speed and time.

    Runs that are still training are compared with the values logged so far.
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
        screen.print(f"{plot} shows the validation curves.", markup=False, soft_wrap=True)
