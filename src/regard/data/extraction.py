"""The extractive stage of document generation: rank the paragraphs of a long document by tf-idf, best first."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from regard.data.objectives import Limited, Objective, Record
from regard.data.scripts import HAN, KANA, OTHERS
from regard.data.tokenizer import Tokenizer

_UNSPACED = f"{HAN}{KANA}{OTHERS}"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")  # in a script without spaces, every character is a word
# The end of a sentence: a full stop and white space, or an ideographic full stop; closing brackets may be between.
_END = re.compile(r"[.!?]+[\"')\]\u2019\u201d]*\s+|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d\uff09]*\s*")


def sentences(text: str) -> list[str]:
    """Split a text after every sentence end that is followed by white space. The list is empty for white space."""
    ends = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    return [part.strip() for part in (text[first:last] for first, last in pairwise(ends)) if part.strip()]


def paragraphs(document: str) -> list[str]:
    """Return the lines of a document, or its sentences if it is a single line. Lines without text are left out."""
    lines = [line.strip() for line in document.split("\n") if line.strip()]
    return lines if len(lines) > 1 else sentences(document)


def scores(title: str, documents: Sequence[str]) -> list[float]:
    """Return the tf-idf score of every document for the words of a title (Liu et al. 2018, section 2.2.1).

        score(p) = sum over the words w of the title of N_w(p) log(N / N_w)

    N_w(p) is the number of times that w occurs in p, N is the number of documents, and N_w is the number of documents
    with w. Here, a word that occurs more than once in the title counts once.
    """
    counts = [Counter(_WORD.findall(document.lower())) for document in documents]
    words = dict.fromkeys(_WORD.findall(title.lower()))  # in order, so that the sums are always rounded equally
    containing = {word: sum(word in count for count in counts) for word in words}
    idf = {word: math.log(len(documents) / number) for word, number in containing.items() if number}
    return [sum(count[word] * weight for word, weight in idf.items()) for count in counts]


def best_first(document: str) -> str:
    """Return the title of a document, then its other paragraphs in the order of their tf-idf scores for the title.

    The title is the first paragraph. Paragraphs of equal score keep their order.
    """
    title, *others = paragraphs(document) or [""]
    scored = scores(title, others)
    ranked = sorted(range(len(others)), key=lambda i: -scored[i])
    return ("\n" if "\n" in document.strip() else " ").join([title, *(others[i] for i in ranked)])


def shortened(
    objective: Objective,
    records: Sequence[Record],
    tokenizers: dict[str, Tokenizer],
    max_len: int,
    long: str | None,
) -> Limited:
    """Return training examples as a token table in which no text has more than `max_len` tokens.

    For pairs, `long` is what happens to an example with a longer source: "drop" leaves the example out, "cut" truncates
    the source, and "extract" truncates it after `best_first` has reordered it.
    """
    table = objective.table(records, tokenizers)
    if long == "extract":
        read, records = objective.input_text, list(records)
        too_long = np.flatnonzero(table["source"].lengths > max_len + 1)  # one token is eos
        for i in too_long.tolist():
            records[i] = (*records[i][:read], best_first(records[i][read]), *records[i][read + 1 :])
        table = objective.table(records, tokenizers) if len(too_long) else table
    return objective.limit(table, max_len, cut=long in ("cut", "extract"))
