"""Pairs in which source and target are exchanged, found by the words of each side."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, SHOWN, Finding, numbered, quoted, share
from regard.doctor.reading import Examples

CLEAR = 4.0  # log-odds of a text from which its side is clear
FEW, MANY, MOST = 0.0005, 0.005, 0.3  # share of exchanged pairs that is a note, a warning, and an error
WORDS = 2  # smallest number of words of a side that is judged
SAMPLED = 20_000  # pairs that are examined first, evenly spread; all others only if some of these are exchanged
LIMIT = 5.0  # largest log-odds of a word


def swapped(case: Case) -> Iterator[Finding]:
    """Find pairs whose source has words that are typical of targets, and whose target has words typical of sources."""
    odds = _word_odds(case.train)
    for text in case.texts:
        pairs = list(zip(*text.columns.values(), strict=True))
        step = max(1, len(pairs) // SAMPLED)
        if step > 1 and sum(_is_swapped(pair, odds) for pair in pairs[::step]) < max(2, FEW * SAMPLED):
            continue
        found = [i for i, pair in enumerate(pairs) if _is_swapped(pair, odds)]
        if len(found) < max(2, FEW * text.size):
            continue
        lines = tuple(map(text.line, found[:MOST_LINES]))
        level = "warning" if len(found) > max(2, MANY * text.size) else "note"
        yield Finding(
            "exchanged sides",
            "error" if len(found) > MOST * text.size else level,
            f"{text.name}: in {len(found):,} pairs source and target are exchanged ({share(len(found), text.size)})",
            (numbered(lines), *(f"{text.place(i)}: {' | '.join(map(quoted, text.record(i)))}" for i in found[:SHOWN])),
            "exchange the two texts of these lines",
            lines,
        )


def _word_odds(text: Examples) -> dict[str, float]:
    """Return for every frequent word the log-odds of being in a source rather than in a target."""
    sample = [column[:: max(1, text.size // SAMPLED)] for column in text.columns.values()]
    counts = [Counter(word for line in column for word in {*line.lower().split()}) for column in sample]
    sizes = [len(column) + 1 for column in sample]
    frequent = {word for count in counts for word, number in count.items() if number >= 5}
    odds = {}
    for word in frequent:
        value = np.log((counts[0][word] + 0.5) / sizes[0]) - np.log((counts[1][word] + 0.5) / sizes[1])
        odds[word] = float(np.clip(value, -LIMIT, LIMIT))
    return odds


def _is_swapped(pair: tuple[str, ...], odds: dict[str, float]) -> bool:
    if pair[0] == pair[1]:
        return False
    source, target = ([odds.get(word, 0.0) for word in {*text.lower().split()}] for text in pair)
    if min(len(source), len(target)) < WORDS:
        return False
    return sum(source) < -CLEAR and sum(target) > CLEAR
