"""Overlap of training and validation text, which makes scores look better than they are."""

from collections.abc import Iterator

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, SHOWN, Finding, quoted, share

MANY, MOST = 0.01, 0.5  # share of the validation examples above which overlap is a warning, and an error
WORDS = 8  # of continuous text, lines with at least this number of words count


def overlap(case: Case) -> Iterator[Finding]:
    """Find validation examples whose input is also in the training text."""
    if case.valid is None:
        return
    name = case.objective.texts[case.objective.input_text]
    least = WORDS if case.objective.stream else 1
    first = dict[str, int]()
    for i, text in enumerate(case.train.columns[name]):
        first.setdefault(text, i)
    inputs = case.valid.columns[name]
    counted = [i for i, text in enumerate(inputs) if _long(text, least)]
    found = [i for i in counted if inputs[i] in first]
    if not found:
        return
    level = "warning" if len(found) > MANY * len(counted) else "note"
    level = "error" if len(found) > MOST * len(counted) else level
    whole = sum(case.train.record(first[inputs[i]]) == case.valid.record(i) for i in found)
    equal = "" if len(case.objective.texts) == 1 else f", {whole:,} of them with the same {_other(case)}"
    examples = tuple(
        f"{case.valid.place(i)} is {case.train.place(first[inputs[i]])}: {quoted(inputs[i])}" for i in found[:SHOWN]
    )
    yield Finding(
        "overlap",
        level,
        f"{len(found):,} of {len(counted):,} validation examples have a {name} that is in the training text "
        f"({share(len(found), len(counted))}){equal}",
        examples,
        "remove them from the training text, so that the validation scores measure unseen text",
        tuple(map(case.valid.line, found[:MOST_LINES])),
    )


def _other(case: Case) -> str:
    return case.objective.texts[1 - case.objective.input_text]


def _long(text: str, least: int) -> bool:
    return least <= 1 or sum(any(map(str.isalpha, word)) for word in text.split()) >= least
