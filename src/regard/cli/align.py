"""The command `align`: word alignments from the cross-attention of a translation model."""

from typing import Annotated

import typer

from regard.cli.base import USE, AsJson, complain, print_json
from regard.cli.inference import RunArgument
from regard.cli.options import Loading, command


@command(USE)
def align(
    run: RunArgument,
    loading: Loading,
    source: Annotated[str, typer.Option(metavar="FILE", help="File with source text, one sentence per line.")],
    target: Annotated[str, typer.Option(metavar="FILE", help="File with the translation, line by line.")],
    gold: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Reference alignments: i-j sure and ipj possible, counted from 1."),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Decoder layer, counted from 0, or mean. Default: last but one; last of fewer than three layers.",
        ),
    ] = None,
    query: Annotated[
        str,
        typer.Option(
            metavar="STEP",
            help="Use the attention of the step that predicts a word (output), or of the step that reads it (input).",
        ),
    ] = "output",
    reverse: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Translation model in the other direction, to symmetrise the alignments."),
    ] = None,
    symmetrise: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="With --reverse: grow-diag (default), intersection or union."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Align the words of sentence pairs, and measure the alignment error rate.

    Each word of the target is linked to the word of the source that receives most of its attention in one layer of the
    decoder. Words are separated by white space. One line per pair is printed in Pharaoh format: i-j links source word i
    to target word j, counted from 0. With --gold, the alignment error rates of all layers and of the diagonal are
    printed on standard error.
    """
    from regard.runs.align import align as align_words

    loaded = loading.load(run)
    loading.set_threads(loaded.parameters)
    other = None if reverse is None else loading.load(reverse)
    result = align_words(
        loaded, source, target, gold=gold, layer=layer, query=query, reverse=other, symmetrise=symmetrise
    )
    if as_json:
        print_json(result.json())
        return
    for line in result.lines():
        print(line)
    scores = {
        (name if name in ("mean", "diagonal") else f"layer {name}"): score for name, score in result.scores.items()
    }
    if result.symmetrised is not None:
        scores[symmetrise or "grow-diag"] = result.symmetrised
    for name, score in scores.items():
        complain(
            f"{name}: error rate {score.error_rate:.1%}, precision {score.precision:.1%}, recall {score.recall:.1%}"
        )
