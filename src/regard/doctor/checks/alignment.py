"""The alignment of source and target: unequal numbers of lines, lines that are shifted, lines that are unrelated."""

from collections.abc import Iterator

import numpy as np

from regard.doctor.case import Case
from regard.doctor.finding import Finding, quoted
from regard.doctor.lag import Span, correlation, spans
from regard.doctor.reading import Part

PARTS = 10  # number of parts of a text whose lengths are correlated separately
LEAST = 200  # smallest number of lines for a correlation
VARIED = 0.25  # smallest standard deviation of the logarithms of lengths for a correlation
CHANCE = 3.5  # correlations below this number of standard errors are chance


def alignment(case: Case) -> Iterator[Finding]:
    """Find unequal numbers of lines, spans of lines that are shifted, and parts whose lengths do not correlate."""
    for text in case.texts:
        for part in text.parts:
            source, target = part.columns.values()
            found = spans(source, target)
            unequal = len(part.counts) == 2 and part.counts[0] != part.counts[1]
            if unequal:
                yield _unequal(part, found)
            if not unequal and any(span.lag for span in found):
                yield _shifted(part, found)
            elif len(found) == 1:
                yield from _unrelated(part)


def _unequal(part: Part, found: list[Span]) -> Finding:
    (source, target), counts = part.files, part.counts
    message = f"{source} has {counts[0]:,} lines but {target} has {counts[1]:,}"
    breaks = tuple(span.first + 1 for span in found[1:])
    if breaks:
        message += f"; they agree up to about line {breaks[0]:,}"
    elif found[0].lag:
        message += f"; line 1 of {source} belongs to line {1 + found[0].lag:,} of {target}"
    else:
        message += f"; they agree, so the end of {source if counts[0] < counts[1] else target} is missing"
    return Finding("alignment", "error", message, _evidence(part, found), _repair(found), breaks)


def _shifted(part: Part, found: list[Span]) -> Finding:
    shifted = [span for span in found if span.lag]
    lines = sum(span.last - span.first for span in shifted)
    message = f"about {lines:,} of {part.size:,} lines of {_names(part)} are shifted: {_described(shifted[0])}"
    if len(shifted) > 1:
        message += f", and {len(shifted) - 1} more spans"
    breaks = tuple(span.first + 1 for span in shifted)
    return Finding("alignment", "error", message, _evidence(part, shifted), _repair(found), breaks)


def _described(span: Span) -> str:
    lag = f"n {'+' if span.lag > 0 else '-'} {abs(span.lag):,}"
    return f"from line {span.first + 1:,} to {span.last:,}, source line n belongs to target line {lag}"


def _names(part: Part) -> str:
    return " and ".join(part.files)


def _evidence(part: Part, found: list[Span]) -> tuple[str, ...]:
    source, target = part.columns.values()
    shifted = [span for span in found if span.lag]
    examples = [_described(span) for span in shifted][:5] if len(shifted) > 1 else []
    for span in found[:3]:
        line = min(max(span.first + 2, -span.lag), len(source) - 1)
        if span.lag and 0 <= line + span.lag < len(target):
            other = line + span.lag
            examples.append(
                f"source line {line + 1:,} {quoted(source[line])} belongs to target line {other + 1:,} "
                f"{quoted(target[other])}"
            )
    return tuple(examples)


def _repair(found: list[Span]) -> str:
    before = 0
    for span in found:
        if span.lag != before:
            count = abs(span.lag - before)
            side = "source" if span.lag < before else "target"
            what = "a line that has" if count == 1 else f"{count:,} lines that have"
            return (
                f"look near line {span.first + 1:,}: the {side} has {what} no counterpart there; remove "
                f"{'it' if count == 1 else 'them'}, or restore the text that the other side lost"
            )
        before = span.lag
    return "remove the lines at the end that have no counterpart, or restore the file that was cut"


def _unrelated(part: Part) -> Iterator[Finding]:
    """Find parts of the text in which the lengths of source and target correlate no more than by chance."""
    pairs = zip(*(column[: part.size] for column in part.columns.values()), strict=True)
    whole = [(i, len(source), len(target)) for i, (source, target) in enumerate(pairs) if source and target]
    if len(whole) < LEAST:
        return
    lines, source, target = (np.asarray(values) for values in zip(*whole, strict=True))
    size = len(whole)
    each = max(LEAST, -(-size // PARTS))
    bad = list[tuple[int, int, float]]()
    tested = 0
    for first in range(0, size - LEAST + 1, each):
        last = size if size - first - each < LEAST else first + each
        here = slice(first, last)
        if min(np.log(lengths[here] + 5).std() for lengths in (source, target)) < VARIED:
            continue
        tested += 1
        value = correlation(source[here], target[here])
        if np.arctanh(min(value, 0.999)) * np.sqrt(last - first - 3) < CHANCE:
            bad.append((part.lines[lines[first]], part.lines[lines[last - 1]], value))
    if bad:
        where = ", ".join(f"{first:,} to {last:,}" for first, last, _ in bad)
        yield Finding(
            "alignment",
            "error" if len(bad) == tested else "warning",
            f"the lengths of source and target do not correlate in lines {where} of {_names(part)}",
            tuple(f"lines {first:,} to {last:,}: correlation {value:.2f}" for first, last, value in bad[:3]),
            "compare some of these lines by eye; shuffle and sort both files together, never one of them",
            tuple(first for first, _, _ in bad),
        )
