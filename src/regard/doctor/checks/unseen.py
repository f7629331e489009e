"""Validation text that differs from the training text: unseen characters, and far more unseen words than usual."""

from collections import Counter
from collections.abc import Iterator, Sequence

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, SHOWN, Finding, numbered, quoted, share

MANY = 0.003  # share of unseen characters above which there is a warning
FACTOR, POINTS = 1.5, 0.1  # the share of unseen words is a warning from this multiple of the usual one plus 10 points
LEAST = 50  # smallest number of validation examples for a comparison


def unseen(case: Case) -> Iterator[Finding]:
    """Find characters and words of the validation text that do not occur in the training text."""
    if case.valid is None:
        return
    for name in case.names:
        train, valid = case.train.columns[name], case.valid.columns[name]
        yield from _characters(case, name, {*"".join(train)}, valid)
        if min(len(train), len(valid)) >= LEAST and not case.objective.stream:
            yield from _words(name, train, valid)


def _characters(case: Case, name: str, known: set[str], valid: Sequence[str]) -> Iterator[Finding]:
    assert case.valid is not None
    counts = Counter("".join(valid))
    strange = {char: count for char, count in counts.items() if char not in known}
    if not strange:
        return
    found = [i for i, text in enumerate(valid) if not known.issuperset(text)]
    lines = tuple(map(case.valid.line, found[:MOST_LINES]))
    part = sum(strange.values()) / sum(counts.values())
    most = sorted(strange, key=lambda char: -strange[char])[:10]
    listed = ", ".join(f"{quoted(char)} (U+{ord(char):04X})" for char in most)
    yield Finding(
        "unseen text",
        "warning" if part > MANY else "note",
        f"the validation {name} has {len(strange)} character{'s' if len(strange) > 1 else ''} unseen in training "
        f"({share(part, 1)} of its text): {listed}",
        (numbered(lines),),
        "prepare both texts in the same way (Unicode form NFC, quotation marks): a model cannot use such characters",
        lines,
    )


def _words(name: str, train: Sequence[str], valid: Sequence[str]) -> Iterator[Finding]:
    """Compare the share of unseen words in the validation text with the share that is usual.

    The usual share is measured on about as many training examples, which are held out from the known words.
    """
    step = max(2, len(train) // len(valid))
    held_out = {*train[::step]}
    usual = _share({word for text in train if text not in held_out for word in text.split()}, train[::step])
    unseen = _share({word for text in train for word in text.split()}, valid)
    if unseen <= FACTOR * usual + POINTS:
        return
    known = {word for text in train for word in text.split()}
    words = Counter(word for text in valid for word in text.split() if word not in known)
    yield Finding(
        "unseen text",
        "warning",
        f"{share(unseen, 1)} of the words of the validation {name} are not in the training text, where "
        f"{share(usual, 1)} would be usual",
        tuple(f"{count:,} times: {quoted(word)}" for word, count in words.most_common(SHOWN)),
        "prepare both texts in the same way (case, tokenization), or take validation text of the same kind",
    )


def _share(known: set[str], texts: Sequence[str]) -> float:
    words = [word for text in texts for word in text.split()]
    return sum(word not in known for word in words) / max(1, len(words))
