"""Plant faults in generated corpora, and measure the recall and precision of the doctor's checks."""

import random
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from regard.doctor.case import Case
from regard.doctor.corpora import BASES, Planted
from regard.doctor.examine import text_report
from regard.runs.request import request_from_options

SEVERITIES = (0.02, 0.05, 0.2)  # share of the examples that are faulty
LONG = 5000  # words of the long line


Plant = Callable[[Planted, float, random.Random], Planted]


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted, and the check that should find it."""

    name: str
    plant: Plant
    check: str
    also: tuple[str, ...] = ()  # checks that may find it, too
    bases: tuple[str, ...] = ("sentences", "demo")


def _chosen(corpus: Planted, share: float, rng: random.Random) -> list[int]:
    return rng.sample(range(len(corpus.source)), max(4, round(share * len(corpus.source))))


def _in_targets(change: Callable[[str], str]) -> Plant:
    """Return a function that plants a fault: it applies `change` to a share of the targets."""

    def plant(corpus: Planted, share: float, rng: random.Random) -> Planted:
        target = list(corpus.target)
        for i in _chosen(corpus, share, rng):
            target[i] = change(target[i])
        return replace(corpus, target=target)

    return plant


def _lost_line(corpus: Planted, share: float, rng: random.Random) -> Planted:
    at = rng.randrange(len(corpus.target) // 2)
    count = max(1, round(share * 50))
    return replace(corpus, target=corpus.target[:at] + corpus.target[at + count :])


def _shifted(corpus: Planted, share: float, rng: random.Random) -> Planted:
    first = rng.randrange(len(corpus.target) // 2)
    last = min(len(corpus.target), first + max(200, round(share * 2 * len(corpus.target))))
    lag = rng.choice((1, 2, 7))
    block = corpus.target[first:last]
    return replace(corpus, target=corpus.target[:first] + block[lag:] + block[:lag] + corpus.target[last:])


def _shuffled(corpus: Planted, share: float, rng: random.Random) -> Planted:
    size = max(len(corpus.target) // 3, round(share * len(corpus.target)))
    first = rng.randrange(len(corpus.target) - size + 1)
    block = corpus.target[first : first + size]
    rng.shuffle(block)
    return replace(corpus, target=corpus.target[:first] + block + corpus.target[first + size :])


def _duplicates(corpus: Planted, share: float, rng: random.Random) -> Planted:
    source, target = list(corpus.source), list(corpus.target)
    for i in _chosen(corpus, max(0.2, 2 * share), rng):
        at = rng.randrange(len(source))
        source.insert(at, corpus.source[i])
        target.insert(at, corpus.target[i])
    return replace(corpus, source=source, target=target)


def _overlap(corpus: Planted, share: float, rng: random.Random) -> Planted:
    count = max(4, round(share * len(corpus.valid)))
    known = rng.sample(list(zip(corpus.source, corpus.target, strict=True)), count)
    return replace(corpus, valid=known + corpus.valid[count:])


def _other_language(corpus: Planted, share: float, rng: random.Random) -> Planted:
    target = list(corpus.target)
    chosen = _chosen(corpus, 1.5 * share, rng)
    french = rng.sample(corpus.french, min(len(chosen), len(corpus.french)))
    for i, text in zip(chosen, french, strict=False):
        target[i] = text
    return replace(corpus, target=target)


def _exchanged(corpus: Planted, share: float, rng: random.Random) -> Planted:
    source, target = list(corpus.source), list(corpus.target)
    for i in _chosen(corpus, share, rng):
        source[i], target[i] = target[i], source[i]
    return replace(corpus, source=source, target=target)


def _long_line(corpus: Planted, share: float, rng: random.Random) -> Planted:  # noqa: ARG001
    source, target = list(corpus.source), list(corpus.target)
    at = rng.randrange(len(source))
    words = [rng.choice(corpus.source) for _ in range(LONG)]
    source[at] = target[at] = " ".join(" ".join(words).split()[:LONG])
    return replace(corpus, source=source, target=target)


def _copies(corpus: Planted, share: float, rng: random.Random) -> Planted:
    target = list(corpus.target)
    long = [i for i, text in enumerate(corpus.source) if len(text.split()) >= 5]
    for i in rng.sample(long, max(4, round(share * len(long)))):
        target[i] = corpus.source[i]
    return replace(corpus, target=target)


def _inside(corpus: Planted, share: float, rng: random.Random) -> Planted:
    source = list(corpus.source)
    for i in _chosen(corpus, max(0.5, share), rng):
        source[i] = f"{source[i]} {corpus.target[i]}"
    return replace(corpus, source=source)


def _prepared_otherwise(corpus: Planted, share: float, rng: random.Random) -> Planted:  # noqa: ARG001
    def other(text: str) -> str:
        text = " ".join(text.replace(".", " .").replace(",", " ,").replace("-", " - ").split())
        return unicodedata.normalize("NFD", text.upper())

    return replace(corpus, valid=[(other(source), other(target)) for source, target in corpus.valid])


def _label_noise(corpus: Planted, share: float, rng: random.Random) -> Planted:
    source, target = list(corpus.source), list(corpus.target)
    names = sorted(set(source))
    for i in _chosen(corpus, share, rng):
        source.append(rng.choice([name for name in names if name != corpus.source[i]]))
        target.append(corpus.target[i])
    return replace(corpus, source=source, target=target)


def _rare_label(corpus: Planted, share: float, rng: random.Random) -> Planted:  # noqa: ARG001
    source = list(corpus.source)
    source[rng.randrange(len(source))] = "something else"
    return replace(corpus, source=source)


def _label_spelling(corpus: Planted, share: float, rng: random.Random) -> Planted:
    source = list(corpus.source)
    for i in _chosen(corpus, share, rng):
        source[i] = source[i].title()
    return replace(corpus, source=source)


def _wrongly_decoded(text: str) -> str:
    return f"{text} für größere Häuser".encode().decode("cp1252", "replace")


FAULTS = (
    Fault("bytes of another encoding", _in_targets(lambda text: text + " f\udcfcr gr\udcf6\udcdfere"), "encoding"),
    Fault("UTF-8 decoded as Windows-1252", _in_targets(_wrongly_decoded), "wrong decoding"),
    Fault("lost lines", _lost_line, "alignment"),
    Fault("shifted lines", _shifted, "alignment"),
    Fault("shuffled targets", _shuffled, "alignment"),
    Fault("duplicates", _duplicates, "duplicates"),
    Fault("validation text in the training text", _overlap, "overlap"),
    Fault("wrong language", _other_language, "language", ("length ratios",)),
    Fault("exchanged sides", _exchanged, "exchanged sides", ("language",)),
    Fault("line of 5,000 words", _long_line, "lengths"),
    Fault(
        "truncated targets",
        _in_targets(lambda text: text[: max(1, len(text) // 12)]),
        "length ratios",
        bases=("sentences",),
    ),
    Fault("untranslated copies", _copies, "copies", ("language",)),
    Fault("target inside the source", _inside, "copies", ("language", "exchanged sides", "unseen text")),
    Fault("HTML", _in_targets(lambda text: f"<p>{escape(text)}<br/>&nbsp;</p>"), "markup"),
    Fault(
        "control characters", _in_targets(lambda text: text.replace(" ", "\x0b ", 1) + "\u200b"), "control characters"
    ),
    Fault("empty targets", _in_targets(lambda _: ""), "empty lines"),
    Fault(
        "a placeholder as target",
        _in_targets(lambda _: "Keine Übersetzung vorhanden."),
        "many targets",
        ("length ratios",),
    ),
    Fault("validation text prepared otherwise", _prepared_otherwise, "unseen text", ("language",)),
    Fault("contradictory labels", _label_noise, "labels", bases=("labels",)),
    Fault("label with one example", _rare_label, "labels", bases=("labels",)),
    Fault("label in two spellings", _label_spelling, "labels", bases=("labels",)),
)


@dataclass(frozen=True)
class Trial:
    """A corpus with at most one fault, and the checks that gave errors or warnings."""

    base: str
    fault: Fault | None
    severity: float
    seed: int
    alarms: frozenset[str]


def trial(folder: Path, base: str, fault: Fault | None, severity: float, seed: int, count: int = 2000) -> Trial:
    """Generate a corpus, plant a fault, and examine it."""
    corpus = BASES[base](count, seed)
    if fault is not None:
        corpus = fault.plant(corpus, severity, random.Random(f"{fault.name} {severity} {seed}"))
    folder.mkdir(parents=True, exist_ok=True)
    report = text_report(Case.of(request_from_options(**corpus.write(folder))))
    return Trial(base, fault, severity, seed, frozenset(f.check for f in report.findings if f.level != "note"))


@dataclass(frozen=True)
class Quality:
    """How well a check finds one kind of planted fault.

    `planted` is the number of corpora with the fault, `found` is the number of these in which the check finds it, and
    `false` is the number of false alarms in other corpora.
    """

    fault: str
    check: str
    planted: int
    found: int
    false: int  # corpora without a fault that the check should or may find, in which it raised an alarm

    @property
    def recall(self) -> float:
        return self.found / max(1, self.planted)

    @property
    def precision(self) -> float:
        return self.found / max(1, self.found + self.false)


def quality(trials: list[Trial]) -> list[Quality]:
    """Return recall and precision for every fault that was planted."""
    results = []
    for fault in FAULTS:
        planted = [each for each in trials if each.fault == fault]
        if not planted:
            continue
        found = sum(fault.check in each.alarms for each in planted)
        others = [
            each for each in trials if each.fault is None or fault.check not in (each.fault.check, *each.fault.also)
        ]
        false = sum(fault.check in each.alarms for each in others if each.base in fault.bases)
        results.append(Quality(fault.name, fault.check, len(planted), found, false))
    return results
