"""The labels of a classifier: rare ones, contradictory ones, spellings that differ only in case or spaces."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, SHOWN, Finding, numbered, quoted, share

NOISE = 0.01  # share of contradictory examples above which there is a warning
RARE = 2  # a class with fewer examples cannot be learned and validated
MAJORITY = 0.9  # share of the most frequent class above which there is a warning
CONTINUOUS = 0.5  # share of different labels above which they are no classes


def labels(case: Case) -> Iterator[Finding]:
    """Find classes with too few or almost all of the examples, contradictory labels, and misspelt labels."""
    column = case.train.columns["label"]
    counts = Counter(column)
    rare = sorted(label for label, count in counts.items() if count < RARE)
    if len(counts) > CONTINUOUS * len(column) and len(column) >= 20:
        yield Finding(
            "labels",
            "error",
            f"there are {len(counts):,} different labels for {len(column):,} examples, so they are probably no classes",
            tuple(map(quoted, list(counts)[:SHOWN])),
            "check which column is the label (data.train[0].label_column)",
        )
    elif rare:
        lines = tuple(case.train.line(i) for i, label in enumerate(column) if counts[label] < RARE)
        yield Finding(
            "labels",
            "warning",
            f"{len(rare):,} of {len(counts):,} classes have a single example: {', '.join(map(quoted, rare[:8]))}",
            (numbered(lines),),
            "add examples or join classes; if line 1 names the columns, set data.train[0].header=true",
            lines[:MOST_LINES],
        )
    label, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count > MAJORITY * len(column):
        yield Finding(
            "labels",
            "warning",
            f"{share(count, len(column))} of the examples have the label {quoted(label)}",
            advice="accuracy is misleading here; compare with the majority class that training prints",
        )
    yield from _spelling(counts)
    yield from _noise(case)
    yield from _unknown(case, counts)


def _spelling(counts: Counter[str]) -> Iterator[Finding]:
    forms = defaultdict(set)
    for label in counts:
        forms["".join(label.casefold().split())].add(label)
    alike = [sorted(group) for group in forms.values() if len(group) > 1]
    if alike:
        yield Finding(
            "labels",
            "warning",
            f"{len(alike)} label{' is' if len(alike) == 1 else 's are'} written in several ways",
            tuple(" | ".join(f"{quoted(label)} {counts[label]:,} times" for label in group) for group in alike[:SHOWN]),
            "write each label in one way: every spelling is a class of its own",
        )


def _noise(case: Case) -> Iterator[Finding]:
    """Find texts that occur several times with different labels."""
    known = defaultdict(Counter)
    pairs = list(zip(case.train.columns["label"], case.train.columns["text"], strict=True))
    for label, text in pairs:
        known[text][label] += 1
    noisy = {text: labels for text, labels in known.items() if len(labels) > 1}
    if not noisy:
        return
    wrong = sum(sum(labels.values()) - max(labels.values()) for labels in noisy.values())
    lines = tuple(case.train.line(i) for i, (_, text) in enumerate(pairs) if text in noisy)
    yield Finding(
        "labels",
        "warning" if wrong > max(2, NOISE * len(pairs)) else "note",
        f"{len(noisy):,} texts occur with several labels; at least {wrong:,} examples are labelled wrongly "
        f"({share(wrong, len(pairs))})",
        (numbered(lines), *(f"{quoted(text)}: {', '.join(noisy[text])}" for text in list(noisy)[:SHOWN])),
        "decide which label is right: no model can learn both",
        lines[:MOST_LINES],
    )


def _unknown(case: Case, counts: Counter[str]) -> Iterator[Finding]:
    if case.valid is None:
        return
    column = case.valid.columns["label"]
    strange = [i for i, label in enumerate(column) if label not in counts]
    if strange:
        lines = tuple(map(case.valid.line, strange))
        yield Finding(
            "labels",
            "error",
            f"the validation text has {len({column[i] for i in strange})} labels that the training text lacks: "
            f"{', '.join(quoted(label) for label in sorted({column[i] for i in strange})[:8])}",
            (numbered(lines),),
            "add training examples of these classes, or remove them from the validation text",
            lines[:MOST_LINES],
        )
