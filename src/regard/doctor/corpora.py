"""Generated corpora without faults, into which faults can be planted."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.demo.corpus import generate
from regard.doctor.sentences import sentences

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Planted:
    """A corpus with training and validation examples. Invalid UTF-8 bytes are stored as lone surrogates."""

    source: list[str]
    target: list[str]
    valid: Pairs
    french: list[str]  # translations of the sources into a third language
    labelled: bool = False  # the sources are labels

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the files of the corpus to a folder, and return the options that name them."""
        if self.labelled:
            train = [f"{label}\t{text}" for label, text in zip(self.source, self.target, strict=True)]
            return {"labelled": _write(folder / "train.tsv", train)}
        valid_source, valid_target = zip(*self.valid, strict=True)
        return {
            "source": _write(folder / "train.en", self.source),
            "target": _write(folder / "train.de", self.target),
            "valid_source": _write(folder / "valid.en", valid_source),
            "valid_target": _write(folder / "valid.de", valid_target),
        }


def _write(path: Path, lines: Iterable[str]) -> str:
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape"))
    return str(path)


def of_sentences(count: int, seed: int) -> Planted:
    """Return a corpus of generated sentences without faults."""
    made = sentences(count + count // 10, seed)
    source, target, french = (list(column) for column in zip(*made[:count], strict=True))
    return Planted(source, target, [(s, t) for s, t, _ in made[count:]], french)


def of_demo(count: int, seed: int) -> Planted:
    """Return the corpus of `regard demo`: numbers, dates and amounts of money."""
    german, french = generate(count, "de", seed, count // 10), generate(count, "fr", seed, count // 10)
    valid = [(example.source, example.target) for example in german.test]
    words = [example.target for example in french.train if sum(map(str.isalpha, example.target)) > 25]
    return Planted([e.source for e in german.train], [e.target for e in german.train], valid, words)


def of_labels(count: int, seed: int) -> Planted:
    """Return labelled sentences without faults. The label is the person in the first two words of a sentence."""
    made = [english for english, _, _ in sentences(count, seed)]
    return Planted([" ".join(text.lower().split()[:2]) for text in made], made, [], [], labelled=True)


BASES: Mapping[str, Callable[[int, int], Planted]] = {"sentences": of_sentences, "demo": of_demo, "labels": of_labels}
