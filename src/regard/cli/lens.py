"""The command `lens`: a page that shows what a trained model attends to."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.base import INSIDE, Device, Threads, TrustCode, complain, set_threads
from regard.cli.options import Average, command
from regard.errors import SpecError

PORT = 8010
MOST = 8  # models of one page
RunsArgument = Annotated[list[str], typer.Argument(metavar="RUN [RUN2]", help="Folders of training runs.")]


@command(INSIDE)
def lens(
    runs: RunsArgument,
    text: Annotated[
        str | None, typer.Option(metavar="SENTENCE", help="Text to begin with. Default: a validation example.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the page for --text to one HTML file that needs no server, and do not serve it."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the page; 0 is any free port. Default: 8010.")
    ] = None,
    show: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open the page in a browser. Default: if there is a screen."),
    ] = None,
    average: Average = None,
    device: Device = "auto",
    threads: Threads = None,
    trust_code: TrustCode = False,
) -> None:
    """Show what a model attends to, in the browser.

    The page shows the attention of every head, the beam search, the alternatives of every token, the logit lens and
    the positions. Heads can be switched off and tokens forced, and the output changes at once. If two runs are given,
    they are shown side by side. The page loads nothing from the network.
    """
    if export is not None and not (text or "").strip():
        raise SpecError("--export", 'needs a text to show; add --text "..."')
    if export is not None and show:
        raise SpecError("--open", "does not apply to --export; open the file yourself")
    if export is not None and port is not None:
        raise SpecError("--port", "does not apply to --export, which starts no server; leave it out")
    if len(runs) > (2 if export else MOST):
        raise SpecError("RUN", f"{len(runs)} runs are too many; give at most {2 if export else MOST}")
    from regard.lens.export import save
    from regard.lens.serve import named, serve
    from regard.runs.trained_model import load
    from regard.serving.serve import check_installed

    if export is None:
        check_installed()
    models = named([load(path, device, average, trust_code=trust_code) for path in runs])
    set_threads(threads, device=device)
    if export is None:
        serve(models, PORT if port is None else port, text, show, complain)
    else:
        save(models, text or "", export)
        complain(f"{export} is written; open it in a browser")
