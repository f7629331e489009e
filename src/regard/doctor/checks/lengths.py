"""Outliers: texts that are far longer than all others, and pairs of very different lengths."""

from collections.abc import Iterator

import numpy as np

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, SHOWN, Finding, counted, numbered, quoted, share

# A text is an outlier from this multiple of the 99th percentile and this number of characters.
FACTOR, LEAST = 8.0, 1000
EXTREME = 30.0  # from this multiple on, it is a warning
FAR, SPREAD = 1.1, 6.0  # a ratio is an outlier from e^1.1 = 3 times the usual one and 6 standard deviations
SOFT = 12.0  # characters added to both lengths, because the ratio of short texts varies
MANY = 0.01  # share of such pairs above which there is a warning


def lengths(case: Case) -> Iterator[Finding]:
    """Find texts that are many times longer than 99 % of the texts of their column."""
    for text in case.texts:
        for name in case.names:
            sizes = np.asarray([len(each) for each in text.columns[name]] or [0])
            usual = float(np.quantile(sizes, 0.99))
            limit = max(LEAST, FACTOR * usual)
            found = np.flatnonzero(sizes > limit).tolist()
            if not found:
                continue
            found.sort(key=lambda i: -sizes[i])
            lines = tuple(sorted(map(text.line, found[:MOST_LINES])))
            yield Finding(
                "lengths",
                "warning" if sizes[found[0]] > max(LEAST, EXTREME * usual) else "note",
                f"{text.name}: {counted(len(found), name)} far longer than the others; the longest has "
                f"{sizes[found[0]]:,} characters, and 99 % have at most {usual:,.0f}",
                (numbered(lines), *(f"{text.place(i)}: {quoted(text.columns[name][i])}" for i in found[:SHOWN])),
                "split or remove them: a batch is as long as its longest example, or training leaves them out",
                lines,
            )


def ratios(case: Case) -> Iterator[Finding]:
    """Find pairs in which one side is many times longer than usual for the other."""
    for text in case.texts:
        source, target = (np.asarray([len(each) for each in column], float) for column in text.columns.values())
        whole = (source > 0) & (target > 0)
        if whole.sum() < 20:
            continue
        usual = np.log(target[whole].sum() / source[whole].sum())
        ratio = np.log((target + SOFT) / (source * np.exp(usual) + SOFT))
        spread = 1.4826 * float(np.median(np.abs(ratio[whole] - np.median(ratio[whole]))))
        limit = max(FAR, SPREAD * spread)
        found = np.flatnonzero(whole & (np.abs(ratio - np.median(ratio[whole])) > limit)).tolist()
        if not found:
            continue
        lines = tuple(map(text.line, found[:MOST_LINES]))
        worst = sorted(found, key=lambda i: -abs(ratio[i]))[:SHOWN]
        yield Finding(
            "length ratios",
            "warning" if len(found) > max(2, MANY * text.size) else "note",
            f"{text.name}: in {len(found):,} pairs one side is over {np.exp(limit):.1f} times longer than usual "
            f"({share(len(found), text.size)})",
            (numbered(lines), *(f"{text.place(i)}: {' | '.join(map(quoted, text.record(i)))}" for i in worst)),
            "look at these lines: a part of the text is probably missing on one side",
            lines,
        )
