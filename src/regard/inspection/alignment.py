"""Word alignments from cross-attention, their symmetrisation, and the alignment error rate."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.data.tokenizer import SPACE, Tokenizer
from regard.errors import DataError

Link = tuple[int, int]  # (index of a source word, index of a target word), from 0
Links = frozenset[Link]
Query = Literal["output", "input"]
LINK = re.compile(r"(\d+)([-p])(\d+)")


@dataclass(frozen=True)
class GoldAlignment:
    """The reference alignment of a sentence pair: sure links, and possible links, which include the sure ones."""

    sure: Links
    possible: Links


def word_indices(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the index of the word that every token belongs to. Words are separated by white space."""
    words, word, new = [], -1, True
    for token_id, token in zip(ids, tokenizer.tokens(ids), strict=True):
        text = token.replace(SPACE, " ")
        new = new or tokenizer.starts_word(token_id)
        if not text.strip():  # a space of its own belongs to the word after it
            words.append(word + 1)
            new = True
            continue
        word, new = word + new, text[-1:].isspace()
        words.append(word)
    return words


def between_words(weights: Float[Tensor, "T S"], target: Sequence[int], source: Sequence[int]) -> Float[Tensor, "W V"]:
    """Return attention between words: summed over the subwords of a source word, averaged over those of a target word.

    `target` and `source` are the word indices of the rows and of the columns.
    """
    columns = weights.new_zeros(weights.shape[0], max(source) + 1)
    columns = columns.index_add(1, torch.tensor(source, device=weights.device), weights)
    index = torch.tensor(target, device=weights.device)
    rows = columns.new_zeros(max(target) + 1, columns.shape[1]).index_add(0, index, columns)
    return rows / torch.bincount(index).to(rows.dtype)[:, None]


def attention_links(
    weights: Float[Tensor, "T S"], target: Sequence[int], source: Sequence[int], query: Query = "output"
) -> Links:
    """Return one link per target word: to the source word that receives most attention.

    `weights` are those of a decoder that reads bos and then the target; the last columns may be eos. If `query` is
    "output", the attention of the step that predicts a word is used (Garg et al. 2019). If it is "input", the attention
    of the next step is used, which reads the word (shift-attention, Chen et al. 2020).
    """
    if not source or not target:
        return frozenset()
    first = 0 if query == "output" else 1
    words = between_words(weights[first : first + len(target), : len(source)], target, source)
    return frozenset((int(word), n) for n, word in enumerate(words.argmax(1)))


def aligning_layer(depth: int) -> int:
    """Return the layer of a decoder whose cross-attention aligns best: the last but one (Garg et al. 2019).

    Of fewer than three layers, return the last.
    """
    return depth - 2 if depth > 2 else depth - 1


def diagonal_links(source: int, target: int) -> Links:
    """Return the links of the diagonal: each target word to the source word at the same relative position."""
    return frozenset((min(source - 1, int((j + 0.5) * source / target)), j) for j in range(target) if source)


def intersection(forward: Collection[Link], backward: Collection[Link]) -> Links:
    """Return the links that are in both alignments."""
    return frozenset(forward) & frozenset(backward)


def union(forward: Collection[Link], backward: Collection[Link]) -> Links:
    """Return the links that are in one of the alignments."""
    return frozenset(forward) | frozenset(backward)


def grow_diagonal(forward: Collection[Link], backward: Collection[Link]) -> Links:
    """Return the grow-diag symmetrisation (Koehn et al. 2003) of two alignments.

    Begin with the intersection. Then repeatedly add links of the union that are horizontal, vertical or diagonal
    neighbours of an accepted link, if their source word or their target word has no link yet.
    """
    accepted, candidates = set(intersection(forward, backward)), sorted(union(forward, backward))
    grown = True
    while grown:
        grown = False
        for i, j in candidates:
            if (i, j) in accepted or not any((i + a, j + b) in accepted for a in (-1, 0, 1) for b in (-1, 0, 1)):
                continue
            if all(i != other for other, _ in accepted) or all(j != other for _, other in accepted):
                accepted.add((i, j))
                grown = True
    return frozenset(accepted)


SYMMETRISATIONS: dict[str, Callable[[Collection[Link], Collection[Link]], Links]] = {
    "intersection": intersection,
    "union": union,
    "grow-diag": grow_diagonal,
}


@dataclass(frozen=True)
class AlignmentScore:
    """Alignment error rate, precision and recall of a set of alignments (Och and Ney 2003)."""

    error_rate: float
    precision: float
    recall: float


def alignment_error_rate(links: Iterable[Collection[Link]], gold: Iterable[GoldAlignment]) -> AlignmentScore:
    """Return the error rate 1 - (|A & S| + |A & P|) / (|A| + |S|), precision |A & P| / |A| and recall |A & S| / |S|.

    A are the links of all sentences, S the sure links and P the possible links, which include S.
    """
    found = sure = in_sure = in_possible = 0
    for own, reference in zip(links, gold, strict=True):
        found, sure = found + len(own), sure + len(reference.sure)
        in_sure += sum(link in reference.sure for link in own)
        in_possible += sum(link in reference.possible for link in own)
    if not found + sure:
        raise DataError("gold: there is no link, neither in the alignments nor in the reference")
    return AlignmentScore(
        1.0 - (in_sure + in_possible) / (found + sure), in_possible / max(1, found), in_sure / max(1, sure)
    )


def parse_gold(line: str, number: int) -> GoldAlignment:
    """Return the reference alignment in a line such as `1-1 2p3`: sure links `i-j`, possible links `ipj`, from 1."""
    sure, possible = set[Link](), set[Link]()
    for text in line.split():
        match = LINK.fullmatch(text)
        if match is None or not (int(match[1]) and int(match[3])):
            raise DataError(
                f"line {number}: {text!r} is not a reference link; write i-j (sure) or ipj (possible), counted from 1"
            )
        link = int(match[1]) - 1, int(match[3]) - 1
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return GoldAlignment(frozenset(sure), frozenset(possible))


def pharaoh(links: Collection[Link]) -> str:
    """Return links in Pharaoh format, `i-j` with source word i and target word j, counted from 0."""
    return " ".join(f"{i}-{j}" for i, j in sorted(links))
