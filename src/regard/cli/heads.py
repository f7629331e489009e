"""The command `heads`: a table of the attention heads of a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.base import INSIDE, AsJson, console, print_json
from regard.cli.inference import RunArgument
from regard.cli.options import Loading, command

if TYPE_CHECKING:
    from regard.inspection.interventions import Head

SourceFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="File with source text. Default: the validation text of the run.")
]
TargetFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="File with the translation of the source, line by line.")
]
TextFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="File with text for a language model. Default: the validation text of the run."),
]


@command(INSIDE)
def heads(
    run: RunArgument,
    loading: Loading,
    source: SourceFile = None,
    target: TargetFile = None,
    text: TextFile = None,
    by: Annotated[
        str, typer.Option(metavar="METHOD", help="Importance of a head: gradient, or ablation (slower).")
    ] = "gradient",
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Largest number of texts to measure.")] = 200,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the importance as a .png, .svg or .pdf file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what each attention head attends to, and how important it is.

    Entropy is in nats; distance is the mean distance to the key in tokens. The next columns are the mean attention to
    the previous and the next token, to the current one, to other positions with the same token, and to punctuation and
    special tokens. Importance by gradient is |dL/dg| per label, where L is the loss of a text and g the factor of the
    head (Michel et al. 2019); by ablation, it is the increase of the loss per label if the head is switched off.
    Layers and heads are counted from 0.
    """
    from regard.inspection.head_plot import check_path
    from regard.runs.heads import heads as head_table

    if plot is not None:
        check_path(plot)
    loaded = loading.load(run)
    loading.set_threads(loaded.parameters)
    screen = console(stderr=True)
    with screen.status("measuring") as status:

        def show(head: "Head") -> None:
            status.update(f"without {head}")

        table = head_table(loaded, source=source, target=target, text=text, by=by, limit=limit, progress=show)
    if plot is not None:
        table.plot(plot)
    if as_json:
        print_json(table.json())
        return
    console().print(table.table())
    print(f"Loss {table.loss:.4f} per label, on {table.texts} texts; importance by {table.by}")
    if plot is not None:
        print(f"Importance of the heads: {plot}")
