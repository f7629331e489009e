"""The command `prune`: remove attention heads from a trained model."""

from typing import Annotated

import typer

from regard.cli.base import SHIP, AsJson, print_json
from regard.cli.heads import SourceFile, TargetFile, TextFile
from regard.cli.inference import RunArgument
from regard.cli.options import Loading, command


@command(SHIP)
def prune(
    run: RunArgument,
    loading: Loading,
    heads: Annotated[
        str,
        typer.Option(
            metavar="SHARE|LIST",
            help="Share of the heads to remove, such as 0.25, or a list such as decoder.cross:1.0,encoder.self:0.3.",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="RUN", help="New folder for the smaller model.")],
    by: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="Importance of a head: gradient (default), or ablation (slower)."),
    ] = None,
    source: SourceFile = None,
    target: TargetFile = None,
    text: TextFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove attention heads, with their parameters, from a trained model.

    The smaller model is written to a new run folder. Its outputs are those of the whole model with these heads switched
    off. If --heads is a share, the least important heads are removed, but every layer keeps at least one head. In a
    list of heads, layers and heads are counted from 0, as `regard heads` prints them. Fine-tune the result with
    `regard train --from`.
    """
    from regard.runs.prune import prune as prune_heads

    loaded = loading.load(run)
    loading.set_threads(loaded.parameters)
    result = prune_heads(loaded, heads, out, by=by, source=source, target=target, text=text)
    if as_json:
        print_json(result.json())
        return
    (before, after), (large, small) = result.heads, result.parameters
    print(f"Removed {before - after} of {before} heads: {', '.join(map(str, result.removed))}")
    print(f"Parameters: {large:,} -> {small:,} ({small / large - 1:+.1%})")
    if result.loss is not None:
        print(f"Loss per label: {result.loss[0]:.4f} -> {result.loss[1]:.4f}")
    print(f"Written to {result.path}")
