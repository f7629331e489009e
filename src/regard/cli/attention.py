"""The command `attention`: draw what a trained model attends to."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.base import INSIDE, AsJson, console, print_json
from regard.cli.input_lines import lines_of
from regard.cli.options import Loading, command
from regard.errors import DataError, SpecError

if TYPE_CHECKING:
    from regard.inspection.recording import Recording

Layer = Annotated[int | None, typer.Option(min=0, metavar="N", help="Layer, counted from 0. Default: the last.")]
Head = Annotated[int | None, typer.Option(min=0, metavar="N", help="Head, counted from 0. Default: the mean of all.")]


@command(INSIDE)
def attention(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a training run.")],
    loading: Loading,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="Text that the model reads. Default: standard input.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text that the decoder reads. Default: the model's own translation."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="Kind of attention: encoder.self, decoder.self or decoder.cross. Default: the last kind of the model.",
        ),
    ] = None,
    layer: Layer = None,
    head: Head = None,
    words: Annotated[bool, typer.Option("--words", help="Join the subwords of each word.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a .png or .svg picture, or a .json file, instead of printing."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the attention of a trained model for one text.

    Rows are queries and columns are keys. A picture file (--out) has one row per layer and one column per head, unless
    you select a layer and a head.
    """
    from regard.runs.inspect import attention as record

    if as_json and head is not None:
        raise SpecError("--head", "applies to pictures; --json prints all heads of a layer; leave out one of the two")
    loading.set_threads()
    options = {"kind": kind, "layer": layer, "head": head, "words": words, "out": out}
    read = _standard_input() if text is None else text
    recording = record(run, read, target, **options, **loading.keywords())
    if as_json:
        print_json((recording.to_words() if words else recording).to_dict())
    elif out is not None:
        console().print(f"Attention: {out}", markup=False, soft_wrap=True)
    else:
        _print(recording, kind, layer, head, words)


def _standard_input() -> str:
    """Return the text on standard input, without the line feed at its end."""
    if sys.stdin is not None and sys.stdin.isatty():
        raise DataError("no text is given; give it after RUN, or pipe it to the command")
    text = "\n".join(lines_of(None))
    if not text.strip():
        raise DataError("standard input is empty; pipe a text to the command, or give it after RUN")
    return text


def _print(recording: "Recording", kind: str | None, layer: int | None, head: int | None, words: bool) -> None:
    """Print one attention matrix, below a line that names it."""
    screen, kind = console(), recording.kind_of(kind)
    numbers = recording.layers[kind]
    heads = recording.attention[kind][-1].shape[0]
    number = numbers[-1] if layer is None else layer
    which = f"head {head}" if head is not None else f"mean of {heads} heads" if heads > 1 else "its only head"
    known = f" of 0 to {numbers[-1]}" if layer is None and len(numbers) > 1 else ""
    title = f"{kind}, layer {number}{known}, {which}. Rows: queries. Columns: keys."
    screen.print(title, markup=False)
    screen.print()
    screen.print(recording.draw(kind, number, head, words, screen.width), markup=False, soft_wrap=True)
