"""Untranslated copies: targets that equal the source or are a part of it."""

from collections.abc import Iterator, Sequence
from statistics import median

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, SHOWN, Finding, Level, numbered, quoted, share
from regard.doctor.reading import Examples

WORDS, LETTERS = 5, 15  # smallest number of words and letters of a copy that should have been translated
MANY, MOST = 0.005, 0.5  # share of such copies above which there is a warning; share of all copies: an error
INSIDE = 0.2  # share of longer sources that contain their target, above which there is a warning
ALIKE = 0.5  # share of common words of other pairs, above which source and target are the same language
SAMPLED = 2000


def copies(case: Case) -> Iterator[Finding]:
    """Find targets that equal their source, and targets that are a part of a longer source."""
    for text in case.texts:
        pairs = list(zip(*text.columns.values(), strict=True))
        same = [i for i, (source, target) in enumerate(pairs) if source == target and source]
        same_language = _alike(pairs)
        if same:
            yield _equal(text, pairs, same, same_language)
        inside = [
            i for i, (source, target) in enumerate(pairs) if len(target) < len(source) and _is_inside(source, target)
        ]
        if not same_language and len(inside) > max(2, INSIDE * text.size):
            lines = tuple(map(text.line, inside[:MOST_LINES]))
            yield Finding(
                "copies",
                "warning",
                f"{text.name}: in {share(len(inside), text.size)} of the pairs the source contains the target",
                (numbered(lines), *(" | ".join(map(quoted, pairs[i])) for i in inside[:SHOWN])),
                "remove the target from the source: the model learns to copy it, and scores measure nothing",
                lines,
            )


def _equal(text: Examples, pairs: Sequence[tuple[str, ...]], same: list[int], same_language: bool) -> Finding:
    long = [i for i in same if len(pairs[i][0].split()) >= WORDS and sum(map(str.isalpha, pairs[i][0])) >= LETTERS]
    level: Level = "warning" if len(long) > max(2, MANY * len(pairs)) and not same_language else "note"
    level = "error" if level == "warning" and len(same) > MOST * len(pairs) else level
    shown = long or same
    lines = tuple(map(text.line, shown[:MOST_LINES]))
    about = f", {len(long):,} of them with {WORDS} words or more" if long else ""
    return Finding(
        "copies",
        level,
        f"{text.name}: in {len(same):,} of {len(pairs):,} pairs the target is the source "
        f"({share(len(same), len(pairs))}){about}",
        (numbered(lines), *(f"{text.place(i)}: {quoted(pairs[i][0])}" for i in shown[:SHOWN])),
        "remove or translate copies that should have been translated: they teach the model to copy",
        lines,
    )


def _alike(pairs: Sequence[tuple[str, ...]]) -> bool:
    """Return whether source and target have most words in common even in pairs that are not copies."""
    other = [pair for pair in pairs if pair[0] != pair[1] and all(pair)]
    some = other[:: max(1, len(other) // SAMPLED)]
    if not some:
        return False
    common = [len((a := {*source.split()}) & (b := {*target.split()})) / max(1, len(a | b)) for source, target in some]
    return median(common) > ALIKE


def _is_inside(source: str, target: str) -> bool:
    long = len(target) >= LETTERS or (len(target) >= LETTERS // 2 and " " in target)
    return long and target in source
