"""Write the texts of bench/defaults.py: real data sets, split into training, validation and test files.

Usage: python bench/texts.py DATA FOLDER, where DATA contains the data sets of recipes/README.md. The files are the same
on every machine. Training runs read only `X.train`, except for data sets with an official validation text. `X.test` is
only for final scores. Settings are chosen on `X.valid`, which is split off from the training text.
"""

import argparse
import gzip
import json
import lzma
import random
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Pair = tuple[str, str]

SIZE = 1000  # examples in a validation set and in a test set


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, which may be compressed."""
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "rt", encoding="utf-8") as text:
        for line in text:
            yield line.rstrip("\n")


def write(folder: Path, name: str, records: Iterable[Pair]) -> None:
    """Write pairs of texts to a file, separated by tabs. Tabs and line feeds in the texts become spaces."""
    cleaned = ("\t".join(text.replace("\t", " ").replace("\n", " ") for text in record) for record in records)
    (folder / name).write_text("".join(f"{line}\n" for line in cleaned), encoding="utf-8")


def split(records: list[Pair], key: Callable[[Pair], str], train: int | None, seed: int = 1) -> dict[str, list[Pair]]:
    """Split pairs into train, valid and test so that no key is in two parts. `train` is the maximum size of train."""
    keys = sorted({key(record) for record in records})
    random.Random(seed).shuffle(keys)
    part_of = {k: "test" if n < SIZE else "valid" if n < 2 * SIZE else "train" for n, k in enumerate(keys)}
    parts: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
    shuffled = sorted(records)
    random.Random(seed + 1).shuffle(shuffled)
    for record in shuffled:
        parts[part_of[key(record)]].append(record)
    return parts | {"train": parts["train"][:train]}


def tatoeba(data: Path) -> dict[str, list[Pair]]:
    """Short sentences, German to English. No English sentence is in two parts."""
    with zipfile.ZipFile(data / "tatoeba-de-en" / "deu-eng.zip") as archive:
        rows = archive.read("deu.txt").decode("utf-8").splitlines()
    pairs = [(german, english) for english, german in (row.split("\t")[:2] for row in rows)]
    return split(pairs, lambda pair: pair[1], 15_000)


def libreoffice(data: Path) -> dict[str, list[Pair]]:
    """Software help texts, English to German."""
    rows = [row.split("\t") for row in lines(data / "libreoffice-help-en-de" / "help.en-de.tsv.gz")]
    return split([(row[0], row[1]) for row in rows if len(row) == 2], lambda pair: pair[0], None)


def sigmorphon(data: Path) -> dict[str, list[Pair]]:
    """German inflection: from a lemma and morphological tags to the inflected form."""

    def read(name: str) -> list[Pair]:
        rows = [row.split("\t") for row in lines(data / "sigmorphon2017" / name)]
        return [(f"{lemma} {tags}", form) for lemma, form, tags in rows]

    train = read("german-train-high")
    random.Random(1).shuffle(train)
    return {"train": train, "test": read("german-dev")}


def numbers(_: Path) -> dict[str, list[Pair]]:
    """Numbers below a million, from digits to German words."""
    from num2words import num2words  # noqa: PLC0415  # installed with the extra `demo`

    drawn = random.Random(1).sample(range(1_000_000), 10_000 + 2 * SIZE)
    pairs = [(str(number), num2words(number, lang="de")) for number in drawn]
    return {"train": pairs[2 * SIZE :], "valid": pairs[SIZE : 2 * SIZE], "test": pairs[:SIZE]}


def trec(data: Path) -> dict[str, list[Pair]]:
    """Questions, classified into six types."""

    def read(name: str) -> list[Pair]:
        rows = (data / "trec" / name).read_bytes().decode("latin-1").splitlines()
        return [(row.split(":", 1)[0], row.split(" ", 1)[1]) for row in rows]

    return {"train": read("train.txt"), "test": read("test.txt")}


def sst2(data: Path) -> dict[str, list[Pair]]:
    """Sentiment of phrases. The test set is the official development set, which has whole sentences."""

    def read(name: str) -> list[Pair]:
        rows = [row.split("\t") for row in lines(data / "sst2" / name)]
        return [(label, text.strip()) for label, text in rows[1:]]

    return {"train": read("train.tsv"), "test": read("dev.tsv")}


def imdb(data: Path) -> dict[str, list[Pair]]:
    """Sentiment of film reviews. A fifth of them is the test set."""
    rows = [row.split("\t") for row in lines(data / "imdb" / "train.tsv.gz")]
    pairs = [(row[0], row[3]) for row in rows]
    random.Random(1).shuffle(pairs)
    return {"train": pairs[len(pairs) // 5 :], "test": pairs[: len(pairs) // 5]}


def aeslc(data: Path) -> dict[str, list[Pair]]:
    """Subject lines of e-mails, generated from the e-mails."""

    def read(name: str) -> list[Pair]:
        records = [json.loads(line) for line in lines(data / "aeslc" / name)]
        return [(record["body"], record["subject"]) for record in records]

    return {"train": read("train.jsonl.gz"), "test": read("dev.jsonl.gz")}


def multi30k(data: Path) -> dict[str, list[Pair]]:
    """Image captions, English to German, from the official tokenised files."""

    def read(name: str) -> list[Pair]:
        sides = [lines(data / "multi30k" / "tok" / f"{name}.lc.norm.tok.{side}.gz") for side in ("en", "de")]
        return list(zip(*sides, strict=True))

    return {"train": read("train"), "valid": read("val"), "test": read("test_2016_flickr")}


def europarl(data: Path) -> dict[str, list[Pair]]:
    """Parliament speeches, German to English."""

    def read(name: str, end: str) -> list[Pair]:
        sides = [lines(data / "europarl-de-en" / f"{name}.{side}{end}") for side in ("de", "en")]
        return list(zip(*sides, strict=True))

    return {"train": read("train", ".xz"), "test": read("valid", "")}


PAIRS: dict[str, Callable[[Path], dict[str, list[Pair]]]] = {
    "tatoeba": tatoeba,
    "libreoffice": libreoffice,
    "sigmorphon": sigmorphon,
    "numbers": numbers,
    "trec": trec,
    "sst2": sst2,
    "imdb": imdb,
    "aeslc": aeslc,
    "multi30k": multi30k,
    "europarl": europarl,
}


def prepare(data: Path, folder: Path, name: str) -> None:
    """Write the training, validation and test files of one text to `folder`, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = ("train", "valid") if name == "tinyshakespeare" else ("train",)
    if all((folder / f"{name}.{part}").exists() for part in whole):
        return
    if name in PAIRS:
        parts = PAIRS[name](data)
        for part in sorted(parts, reverse=True):  # train last: if it exists, all files exist
            if part != "train":
                write(folder, f"{name}.{part}", parts[part])
        write(folder, f"{name}.train", parts["train"])
        return
    if name == "tinyshakespeare":
        text = (data / name / "input.txt").read_text(encoding="utf-8")
        cut = int(0.9 * len(text))
        # As in nanoGPT, the test text also chooses the checkpoint. Holding out the end of the training text instead
        # would remove plays that continue in the test text: the loss of an n-gram model rises from 1.52 to 1.69.
        parts_ = {"train": text[:cut], "valid": text[cut:], "test": text[cut:]}
    else:
        parts_ = {
            "train": "\n".join(lines(data / "wikitext-2" / "wiki.train.tokens.gz")) + "\n",
            "test": "\n".join(lines(data / "wikitext-2" / "wiki.valid.tokens.gz")) + "\n",
        }
    for part in ("valid", "test", "train"):
        if part in parts_:
            (folder / f"{name}.{part}").write_text(parts_[part], encoding="utf-8")


NAMES = (*PAIRS, "tinyshakespeare", "wikitext")


def main() -> None:
    """Write the files of all texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for name in NAMES:
        prepare(arguments.data, arguments.folder, name)


if __name__ == "__main__":
    main()
