"""Align the words of sentence pairs by the cross-attention of a trained translator, and measure the error rate."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from regard.data.text import ParallelFiles, lines
from regard.errors import DataError, SpecError, nearest
from regard.inspection.alignment import (
    SYMMETRISATIONS,
    AlignmentScore,
    GoldAlignment,
    Links,
    aligning_layer,
    alignment_error_rate,
    attention_links,
    diagonal_links,
    parse_gold,
    pharaoh,
    word_indices,
)
from regard.inspection.record import attention
from regard.runs.heads import ROWS
from regard.runs.inference import Runs, load_one, load_runs
from regard.runs.options import LoadOptions, accepts, cpu_threads
from regard.runs.trained_model import TrainedModel

MEAN = "mean"  # the name of the mean over all layers
QUERIES = ("output", "input")
Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Alignments:
    """The links of every sentence pair, in the chosen layer; with a reference, the scores of each layer."""

    links: tuple[Links, ...]
    layer: str
    scores: Mapping[str, AlignmentScore]  # by layer ("0", "1", ..., "mean"), and "diagonal"; {}: no reference
    symmetrised: AlignmentScore | None = None

    def lines(self) -> Iterator[str]:
        """Yield every alignment in Pharaoh format."""
        return map(pharaoh, self.links)

    def json(self) -> dict[str, Any]:
        """Return the alignments and scores as a JSON object."""
        scores = {name: asdict(score) for name, score in self.scores.items()}
        joint = None if self.symmetrised is None else asdict(self.symmetrised)
        return {"layer": self.layer, "scores": scores, "symmetrised": joint, "alignments": list(self.lines())}


@accepts(LoadOptions, load_runs)
def align(  # noqa: PLR0913  # the options of the command
    run: Runs,
    source: str | Path,
    target: str | Path,
    *,
    gold: str | Path | None = None,
    layer: int | str | None = None,
    query: str = "output",
    reverse: Runs | None = None,
    symmetrise: str | None = None,
    threads: int | None = None,
    **options: Unpack[LoadOptions],
) -> Alignments:
    """Align the words of the line pairs of two files, by the cross-attention of a trained translator.

    Each target word is linked to the source word that receives most of its attention, averaged over the heads of a
    `layer` (from 0, or "mean" for all layers). The default is the last but one, which aligns best according to Garg et
    al. 2019, or the last of fewer than three layers. If `query` is "output", the attention of the step that predicts a
    word is used. If it is "input", the attention of the next step is used, which reads the word. Words are separated by
    white space. `reverse` is a translator in the other direction: its alignments are symmetrised with those of `run` by
    `symmetrise` (default: "grow-diag"). `gold` is a file of reference alignments.
    """
    if symmetrise is not None and reverse is None:
        raise SpecError("--symmetrise", "needs a model of the other direction; give --reverse, or leave it out")
    symmetrise = symmetrise or "grow-diag"
    if symmetrise not in SYMMETRISATIONS:
        raise SpecError("--symmetrise", f"{symmetrise!r} is not known; {nearest(symmetrise, SYMMETRISATIONS)}")
    model = load_one(run, "align", **options)
    pairs = list(ParallelFiles(str(source), str(target)).records())
    references = None if gold is None else _references(gold, pairs)
    with cpu_threads(threads):
        found = by_layer(model, pairs, query)
        chosen = _chosen(layer, list(found))
        scores = {} if references is None else _scores(found, pairs, references)
        if reverse is None:
            return Alignments(tuple(found[chosen]), chosen, scores)
        backward = by_layer(load_one(reverse, "align", **options), [(there, here) for here, there in pairs], query)
    theirs = [frozenset((i, j) for j, i in links) for links in backward[_chosen(layer, list(backward))]]
    joint = tuple(SYMMETRISATIONS[symmetrise](a, b) for a, b in zip(found[chosen], theirs, strict=True))
    return Alignments(joint, chosen, scores, None if references is None else alignment_error_rate(joint, references))


def by_layer(run: TrainedModel, pairs: Pairs, query: str = "output") -> dict[str, list[Links]]:
    """Return the links of every sentence pair by the attention of each layer, and by the mean over all layers."""
    run.check_command("translate")
    if query not in QUERIES:
        raise SpecError("--query", f"{query!r} is not known; {nearest(query, QUERIES)}")
    full = [n for n, pair in enumerate(pairs) if all(text.split() for text in pair)]
    found: dict[str, list[Links]] = {}
    for start in range(0, len(full), ROWS):
        numbers = full[start : start + ROWS]
        for n, layers in zip(numbers, _of_batch(run, [pairs[n] for n in numbers], numbers, query), strict=True):
            for name, links in layers.items():
                found.setdefault(name, [frozenset()] * len(pairs))[n] = links
    if not found:
        raise DataError("there is no sentence pair to align: every line is empty")
    return found


def _of_batch(run: TrainedModel, pairs: Pairs, numbers: Sequence[int], query: Any) -> Iterator[dict[str, Links]]:
    """Yield the links of each sentence pair by layer."""
    try:
        batch = run.batch(pairs)
    except DataError:  # find the sentence pair, for the number of its line
        for n, pair in zip(numbers, pairs, strict=True):
            try:
                run.batch([pair])
            except DataError as error:
                raise DataError(f"line {n + 1}: {str(error).partition(': ')[2] or error}") from None
        raise
    recorded = attention(run.model, batch).get("decoder.cross")
    if recorded is None:
        raise DataError(f"{run.path} has no cross-attention, so it cannot align words; use an encoder-decoder")
    assert batch.source is not None
    layers = {str(n): weights.mean(1) for n, weights in enumerate(recorded)}
    layers[MEAN] = sum(layers.values()) / len(layers)  # type: ignore[reportArgumentType]
    for row, (n, pair) in enumerate(zip(numbers, pairs, strict=True)):
        sides = []
        for ids, seg, side, text in (
            (batch.source, batch.source_seg, "source", pair[0]),
            (batch.target, batch.target_seg, "target", pair[1]),
        ):
            length = ids.shape[1] if seg is None else int((seg[row] != 0).sum())
            row_ids = ids[row, :length].tolist()
            words = (
                row_ids[:-1] if side == "source" else row_ids[1:]
            )  # without the eos of the source, the bos of the target
            sides.append(_words(run, words, side, text, n))
        yield {name: attention_links(weights[row], sides[1], sides[0], query) for name, weights in layers.items()}


def _words(run: TrainedModel, ids: Sequence[int], side: str, text: str, number: int) -> list[int]:
    """Return the word indices of the tokens of a text; raise an error unless they have all words of the text."""
    words = word_indices(run.tokenizers[side], ids)
    if not words or words[-1] + 1 != len(text.split()):
        have = words[-1] + 1 if words else 0
        raise DataError(
            f"line {number + 1}: the tokens of the {side} have {have} words, but the line has {len(text.split())}; "
            "shorten the line, or leave it out"
        )
    return words


def _chosen(layer: int | str | None, names: list[str]) -> str:
    """Return the name of the chosen layer; by default the last but one, or the last of fewer than three layers."""
    layers = names[:-1]
    if layer is None:
        return layers[aligning_layer(len(layers))]
    if str(layer) not in names:
        raise SpecError("--layer", f"{layer!r} is not one of {', '.join(names)}")
    return str(layer)


def _references(path: str | Path, pairs: Pairs) -> list[GoldAlignment]:
    """Return the reference alignments in a file; raise an error for one that does not fit its sentence pair."""
    references = [parse_gold(line, number) for number, line in enumerate(lines(path), start=1)]
    if len(references) != len(pairs):
        count = f"{len(references)} lines, but there are {len(pairs)} sentence pairs"
        raise DataError(f"{path} has {count}; align line by line")
    for number, (reference, pair) in enumerate(zip(references, pairs, strict=True), start=1):
        words = tuple(len(text.split()) for text in pair)
        for i, j in sorted(reference.possible):
            if i >= words[0] or j >= words[1]:
                have = f"the sentences have {words[0]} and {words[1]} words"
                raise DataError(f"{path}, line {number}: links words {i + 1} and {j + 1}, but {have}; use its tokens")
    return references


def _scores(
    found: Mapping[str, Iterable[Links]], pairs: Pairs, references: Sequence[GoldAlignment]
) -> dict[str, AlignmentScore]:
    scores = {name: alignment_error_rate(links, references) for name, links in found.items()}
    diagonal = [diagonal_links(len(source.split()), len(target.split())) for source, target in pairs]
    return scores | {"diagonal": alignment_error_rate(diagonal, references)}
