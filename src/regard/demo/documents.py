"""Generate long documents with summaries, for which the best possible perplexity is known at every input length.

    source   e7 .  e3 a1 v8 .  e7 a0 v5 .  e9 a0 v2 .  e7 a1 v4 .
    target   e7 a0 v5 e7 a1 v4

The title of a document is an entity. Every paragraph is a fact: entity, attribute, value. For each attribute, one
random paragraph is a fact about the title entity. All other paragraphs are facts about other entities. The summary
lists the facts about the title entity in the order of the attributes. A model that reads only the first L tokens of a
document can only guess the values in later paragraphs.

The paragraphs about the title entity are uniformly distributed. With `places="doubling"`, one of them is the first
paragraph, one is among the next two, one among the next four, and so on; their order is random. So a model that reads
twice as many tokens reads one more fact, however long the documents are.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from regard.errors import DataError, SpecError
from regard.files import new_folder

TITLE, PARAGRAPH = 2, 4  # number of words, with the full stop
Fact = tuple[int, int, int]  # (entity, attribute, value)


@dataclass(frozen=True, slots=True)
class FactDocuments:
    """The distribution of the documents: the number of paragraphs, attributes, entities and values."""

    paragraphs: int = 32
    attributes: int = 4  # number of paragraphs about the title entity, and of facts in a summary
    entities: int = 64
    values: int = 32
    places: Literal["uniform", "doubling"] = "uniform"  # of the paragraphs about the title entity

    def __post_init__(self) -> None:
        """Raise SpecError if there are too few paragraphs, entities or values, or if they do not fit `places`."""
        for name, least in (("attributes", 1), ("entities", 2), ("values", 2), ("paragraphs", self.attributes)):
            if getattr(self, name) < least:
                raise SpecError(name, f"must be at least {least}, not {getattr(self, name)}")
        if self.places not in ("uniform", "doubling"):
            raise SpecError("places", f"must be 'uniform' or 'doubling', not {self.places!r}")
        if self.places == "doubling" and self.paragraphs != (count := 2**self.attributes - 1):
            ranges = f"with places='doubling', {self.attributes} attributes need 1 + 2 + 4 + ... = {count:,} paragraphs"
            raise SpecError("paragraphs", f"{ranges}, not {self.paragraphs:,}")

    def document(
        self, title: int, places: Sequence[int], values: Sequence[int], others: Sequence[Fact]
    ) -> tuple[str, str]:
        """Return (document, summary).

        Fact n about the title entity has the value `values[n]` and is in paragraph `places[n]`. The other paragraphs
        are the facts `others`, in this order. The document ends before a paragraph for which no fact is given.
        """
        facts = {place: (title, n, value) for n, (place, value) in enumerate(zip(places, values, strict=True))}
        rest = iter(others)
        source = [f"e{title} ."]
        for i in range(self.paragraphs):
            if (fact := facts.get(i) or next(rest, None)) is None:
                break
            source.append("e{} a{} v{} .".format(*fact))
        return " ".join(source), " ".join(f"e{title} a{n} v{value}" for n, value in enumerate(values))

    def generate(self, count: int, seed: int | str = 1, words: int | None = None) -> Iterator[tuple[str, str]]:
        """Yield `count` random pairs (document, summary). The same seed gives the same pairs on every machine.

        If `words` is given, only the first `words` words of each document are generated.
        """
        limit = self.words if words is None else min(self.words, words)
        shown = -(-max(0, limit - TITLE) // PARAGRAPH)  # number of paragraphs, in whole or in part
        rng = random.Random(f"documents {seed}")
        for _ in range(count):
            title, places = rng.randrange(self.entities), self._places(rng)
            values = [rng.randrange(self.values) for _ in places]
            others = [self._other(title, rng) for _ in range(shown - sum(place < shown for place in places))]
            source, summary = self.document(title, places, values, others)
            yield (source if words is None else " ".join(source.split(" ", limit)[:limit])), summary

    def _places(self, rng: random.Random) -> list[int]:
        """Return the indices of the paragraphs about the title entity, in the order of their attributes."""
        if self.places == "uniform":
            return rng.sample(range(self.paragraphs), self.attributes)
        places = [rng.randrange(2**i - 1, 2 ** (i + 1) - 1) for i in range(self.attributes)]
        rng.shuffle(places)
        return places

    def _other(self, title: int, rng: random.Random) -> Fact:
        entity = rng.randrange(self.entities - 1)
        return entity + (entity >= title), rng.randrange(self.attributes), rng.randrange(self.values)

    def write(
        self,
        folder: str | Path,
        train: int = 50_000,
        valid: int = 500,
        test: int = 1000,
        seed: int = 1,
        words: int | None = None,
    ) -> None:
        """Write `train`, `valid` and `test` random pairs to train.tsv, valid.tsv and test.tsv in a new folder.

        If `words` is given, only the first `words` words of each document are written.
        """
        if Path(folder).exists():
            raise DataError(f"{folder} exists; choose another folder")
        with new_folder(Path(folder)) as making:
            for name, count in (("train", train), ("valid", valid), ("test", test)):
                with open(making / f"{name}.tsv", "w", encoding="utf-8", newline="\n") as file:
                    file.writelines(
                        f"{source}\t{target}\n" for source, target in self.generate(count, f"{name} {seed}", words)
                    )

    @property
    def words(self) -> int:
        """Number of words in a document. With the tokenizer `words`, each word is one token."""
        return TITLE + PARAGRAPH * self.paragraphs

    @property
    def labels(self) -> int:
        """Number of labels of a summary: one for each word of its facts, and one for eos."""
        return 3 * self.attributes + 1

    def optimal_perplexity(self, max_len: int, extract: bool = False) -> float:
        """Return the perplexity of the best possible model that reads at most `max_len` tokens of a document.

            P = exp(K (1 - f) ln V / (3 K + 1))

        K is the number of facts in a summary, which has 3 K + 1 labels: the words of the facts, and eos. V is the
        number of values. f is the probability that the value of a fact is read (`share_read`). Given everything that is
        read, a value that is not read is uniformly distributed.
        """
        return math.exp(self.attributes * (1 - self.share_read(max_len, extract)) * math.log(self.values) / self.labels)

    def share_read(self, max_len: int, extract: bool = False) -> float:
        """Return the probability that a model that reads at most `max_len` tokens reads the value of a fact.

        If the model reads the values of n of the N paragraphs, the probability is n / N. With doubling places and K
        facts per summary, it is k / K for the first 2^k - 1 paragraphs, and linear between these points. With
        `extract`, the sources are shortened with data.long=extract. Then the paragraphs about the title entity come
        first, and the probability is min(n, K) / K.
        """
        # The value is the third word of a paragraph.
        n = min(self.paragraphs, max(0, (max_len - TITLE + 1) // PARAGRAPH))
        if extract:
            return min(n, self.attributes) / self.attributes
        if self.places == "uniform":
            return n / self.paragraphs
        k = (n + 1).bit_length() - 1
        return (k + (n + 1 - 2**k) / 2**k) / self.attributes
