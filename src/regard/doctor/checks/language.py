"""The languages of the text, identified by py3langid."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from regard.data.text import MAGIC
from regard.doctor.case import Case
from regard.doctor.finding import SHOWN, Finding, numbered, quoted, share
from regard.doctor.reading import Examples

PACKAGE = "py3langid"
LETTERS, READ = 20, 400  # letters of the shortest texts that are identified, and characters that are read
SAMPLED = 10_000  # texts of a column that are identified, evenly spread
SURE = 0.9  # probability from which a language counts
FEW, MANY = 0.002, 0.02  # share of texts in another language that is a note, and a warning
LEAST = 20  # smallest number of identified texts for a finding


@dataclass
class Languages:
    """The main language of a column, and the examples that are almost certainly in another language."""

    main: str = ""
    identified: int = 0
    other: list[tuple[int, str]] = field(default_factory=list)  # (example, language)


def language(case: Case) -> Iterator[Finding]:
    """Find text that is in the wrong language.

    This can be examples in another language than most, a main language that contradicts the file name, or validation
    text in another language than the training text.
    """
    main = dict[str, str]()
    for text in case.texts:
        for position, name in enumerate(case.names):
            found = identified(text.columns[name])
            if found.identified < LEAST:
                continue
            yield from _mixed(text, name, found)
            yield from _misnamed(text, position, name, found)
            if main.setdefault(name, found.main) != found.main:
                yield Finding(
                    "language",
                    "error",
                    f"the {name} is {found.main!r} in the validation text, but {main[name]!r} in the training text",
                    (quoted(text.columns[name][0]),),
                    "give validation text in the languages of the training text",
                )
    if len(main) == 2 and len(set(main.values())) == 1:
        code = main["source"]
        yield Finding("language", "note", f"source and target are in the same language ({code!r})")


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # noqa: PLC0415  # optional, and slow to import

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def installed() -> bool:
    """Return whether py3langid is installed (pip install 'regard[doctor]')."""
    return find_spec(PACKAGE) is not None


def identified(texts: Sequence[str]) -> Languages:
    """Identify the languages of a sample of texts."""
    long = [i for i, text in enumerate(texts) if len(text) >= LETTERS]
    sample = long[:: max(1, -(-len(long) // SAMPLED))]
    sample = [i for i in sample if sum(map(str.isalpha, texts[i][:READ])) >= LETTERS]
    sure = list[tuple[int, str]]()
    for i in sample:
        code, probability = _identifier().classify(texts[i][:READ])
        if probability >= SURE:
            sure.append((i, code))
    if not sure:
        return Languages()
    main = Counter(code for _, code in sure).most_common(1)[0][0]
    return Languages(main, len(sample), [(i, code) for i, code in sure if code != main])


def _mixed(text: Examples, name: str, found: Languages) -> Iterator[Finding]:
    part = len(found.other) / found.identified
    if len(found.other) < 2 or part < FEW:
        return
    counts = Counter(code for _, code in found.other).most_common(SHOWN)
    lines = tuple(text.line(i) for i, _ in found.other)
    examples = (f"{text.place(i)} ({code}): {quoted(text.columns[name][i])}" for i, code in found.other[:SHOWN])
    yield Finding(
        "language",
        "warning" if part > MANY and len(found.other) > 2 else "note",
        f"{text.name}: {share(len(found.other), found.identified)} of the {name} are not in {found.main!r}, but in "
        f"{', '.join(f'{code!r} ({count:,})' for code, count in counts)}, of {found.identified:,} texts identified",
        (numbered(lines), *examples),
        "remove lines in a wrong language, or train on them on purpose",
        lines,
    )


def _misnamed(text: Examples, position: int, name: str, found: Languages) -> Iterator[Finding]:
    """Compare the main language with the language code at the end of the file name, if there is one (`train.en.gz`)."""
    for part in text.parts:
        if position >= len(part.files):
            continue
        path = Path(part.files[position])
        ending = Path(path.stem).suffix if path.suffix in MAGIC else path.suffix
        code = ending.removeprefix(".")
        if code in _identifier().labels and code != found.main and _clear(found):
            yield Finding(
                "language",
                "warning",
                f"{path} is named {code!r}, but its text is in {found.main!r}",
                (quoted(next((line for line in text.columns[name] if len(line) >= LETTERS), "")),),
                "if source and target are exchanged, exchange the options --source and --target",
            )


def _clear(found: Languages) -> bool:
    return len(found.other) < 0.2 * found.identified
