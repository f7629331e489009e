"""Duplicates: examples that occur several times, and one target for many sources."""

from collections import Counter
from collections.abc import Iterator

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, SHOWN, Finding, numbered, quoted, share

MANY = 0.1  # share of repeated examples above which they are a warning
WORDS = 3  # smallest number of words of a repeated example that counts for a warning
ONE_TARGET = 0.01  # share of the pairs that have the same target, above which it is a warning
DIFFERENT = 0.5  # smallest share of different targets; with fewer, the targets are like classes
FEW = 20  # number of examples with one target that is never a warning


def duplicates(case: Case) -> Iterator[Finding]:
    """Find examples that are repeated, one after the other or anywhere else."""
    records = list(zip(*case.train.columns.values(), strict=True))
    counts = Counter(records)
    repeated = {record: count for record, count in counts.items() if count > 1}
    if not repeated:
        return
    extra = sum(repeated.values()) - len(repeated)
    long = sum(n - 1 for record, n in repeated.items() if max(len(t.split()) for t in record) >= WORDS)
    lines = _lines(case, records, repeated)
    most = sorted(repeated, key=lambda record: -repeated[record])[:SHOWN]
    examples = (f"{repeated[record]:,} times: {' | '.join(map(quoted, record))}" for record in most)
    yield Finding(
        "duplicates",
        "warning" if long > MANY * len(records) else "note",
        f"{extra:,} of {len(records):,} training examples repeat an earlier one ({share(extra, len(records))})",
        (f"repeated in {numbered(lines)}", *examples),
        "remove repetitions, unless they are as frequent in the text to translate: each counts again in an epoch",
        lines,
    )


def _lines(case: Case, records: list[tuple[str, ...]], repeated: dict[tuple[str, ...], int]) -> tuple[int, ...]:
    """Return the line numbers of examples that repeat an earlier one."""
    seen, lines = set[tuple[str, ...]](), list[int]()
    for i, record in enumerate(records):
        if record in repeated:
            if record in seen:
                lines.append(case.train.line(i))
            seen.add(record)
        if len(lines) == MOST_LINES:
            break
    return tuple(lines)


def many_targets(case: Case) -> Iterator[Finding]:
    """Find sources with several targets, and targets that many different sources share."""
    pairs = {pair for pair in zip(*case.train.columns.values(), strict=True) if all(map(str.strip, pair))}
    if not pairs:
        return
    sources, targets = Counter(source for source, _ in pairs), Counter(target for _, target in pairs)
    several = [source for source, count in sources.items() if count > 1]
    if several:
        examples = sum(sources[source] for source in several)
        most = sorted(several, key=lambda source: (-sources[source], source))[:SHOWN]
        yield Finding(
            "many targets",
            "note",
            f"{len(several):,} sources have several targets ({share(examples, len(pairs))} of the different pairs)",
            tuple(f"{sources[source]} targets: {quoted(source)}" for source in most),
            "usual in good text; keep all targets of a source on one side of a split of your own",
        )
    target, count = max(targets.items(), key=lambda item: item[1])
    if count > max(FEW, ONE_TARGET * len(pairs)) and len(targets) > DIFFERENT * len(pairs):
        yield Finding(
            "many targets",
            "warning",
            f"{count:,} different sources have the same target ({share(count, len(pairs))})",
            (quoted(target),),
            "remove these pairs, if the target is a placeholder or an error message: the model learns to repeat it",
        )
