"""The extractive stage of document generation: rank the paragraphs of a long document by tf-idf, best first."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from regard.data.objectives import Limited, Objective, Record
from regard.data.scripts import words
from regard.data.tokenizer import Tokenizer

# The end of a sentence: one of STOPS, optional closing quotes or brackets, and white space. After an ideographic full
# stop, exclamation mark or question mark, white space is optional.
STOPS = (
    r".!?\u0589\u061f\u06d4\u0964\u0965\u104b\u1362\u17d4"  # Latin, Armenian, Arabic, Indic, Burmese, Ethiopic, Khmer
)
_END = re.compile(rf"[{STOPS}]+[\"')\]\u2019\u201d]*\s+|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d\uff09]*\s*")


def sentences(text: str) -> list[str]:
    """Split a text into sentences. If the text is empty or only white space, the list is empty."""
    ends = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    return [part.strip() for part in (text[first:last] for first, last in pairwise(ends)) if part.strip()]


def paragraphs(document: str) -> list[str]:
    """Return the lines of a document, or its sentences if the document is a single line. Blank lines are left out."""
    lines = [line.strip() for line in document.split("\n") if line.strip()]
    return lines if len(lines) > 1 else sentences(document)


def scores(title: str, documents: Sequence[str]) -> list[float]:
    """Return the tf-idf score of every document for the words of a title (Liu et al. 2018, section 2.2.1).

        score(p) = sum over the words w of the title of N_w(p) log(N / N_w)

    N_w(p) is the number of times that w occurs in p, N is the number of documents, and N_w is the number of documents
    that contain w. A word that occurs more than once in the title counts only once.
    """
    counts = [Counter(words(document)) for document in documents]
    distinct = dict.fromkeys(words(title))  # in order, so that the sums are always rounded equally
    containing = {word: sum(word in count for count in counts) for word in distinct}
    idf = {word: math.log(len(documents) / number) for word, number in containing.items() if number}
    return [sum(count[word] * weight for word, weight in idf.items()) for count in counts]


def best_first(document: str) -> str:
    """Return a document with its paragraphs sorted by their tf-idf scores for the title, highest score first.

    The title is the first paragraph, and stays first. Paragraphs with equal scores keep their order.
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

    For pairs, `long` sets how an example with a longer source is treated. With "drop", the example is left out. With
    "cut", the source is truncated. With "extract", the paragraphs of the source are first sorted by `best_first`, and
    then the source is truncated.
    """
    table = objective.table(records, tokenizers)
    if long == "extract":
        read, records = objective.input_text, list(records)
        too_long = np.flatnonzero(table["source"].lengths > max_len + 1)  # one token is eos
        for i in too_long.tolist():
            records[i] = (*records[i][:read], best_first(records[i][read]), *records[i][read + 1 :])
        table = objective.table(records, tokenizers) if len(too_long) else table
    return objective.limit(table, max_len, cut=long in ("cut", "extract"))
