"""Encoding a corpus word by word: text repeats itself, and a word that was encoded once is looked up from then on.

A byte-level BPE never joins what stands on two sides of a space or a line feed, so the ids of a text are those of its
words, each with the space before it. A corpus has some hundred times fewer different words than words.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from regard.data.token_store import Column
from regard.errors import DataError

MOST = 1 << 19  # words that are remembered; then all are forgotten, so that memory has a bound
# Where a text may be cut: before a space that ends a word, and around a line feed. What the tokenizer takes for white
# space is white space for Python too, with four control characters more, so that no run of it is cut.
CUT = re.compile(r"(?<=\S)(?= )|(?=\n)|(?<=\n)")


class WordMemory(dict[str, int]):
    """Words by number, and the ids of each.

    A key is a word that follows a space, or a space and then what follows none: `of` stands for " of", " of" for "of".
    """

    def __init__(self, encode: Callable[[list[str]], list[list[int]]]) -> None:
        super().__init__()
        self._encode = encode
        self._ids, self._new = Column.of([]), list[str]()

    def __missing__(self, key: str) -> int:
        self._new.append(key)
        self[key] = number = len(self)
        return number

    def column(self, texts: list[str]) -> Column:
        """The ids of texts, each as `encode` gives them."""
        if len(self) > MOST:
            self._forget()
        ends = [0]

        def keys() -> Iterator[list[str]]:
            for text in texts:  # one by one, so that the words of few texts are in memory at a time
                found = _keys(text)
                ends.append(ends[-1] + len(found))
                yield found

        numbers = np.fromiter(map(self.__getitem__, chain.from_iterable(keys())), np.int64)
        try:
            self._learn()
        except DataError:  # the texts know better where the fault is
            self._forget()
            return Column.of(self._encode(texts))
        laid = self._ids.take(numbers)
        return Column(laid.ids, laid.offsets[ends])

    def _forget(self) -> None:
        self.clear()
        self._ids = Column.of([])

    def _learn(self) -> None:
        """The ids of the words that were not known."""
        new, self._new = self._new, []
        found = Column.of(self._encode([key[1:] if key.startswith(" ") else " " + key for key in new]))
        ids = np.concatenate([self._ids.ids[:], found.ids[:]])
        self._ids = Column(ids, np.concatenate([self._ids.offsets, self._ids.offsets[-1] + found.offsets[1:]]))


def _keys(text: str) -> list[str]:
    words = text.split()
    if " ".join(words) != text:  # white space other than one space between words
        parts = CUT.split(text)
        return [part[1:] if part[:1] == " " and part[1:2] != " " else " " + part for part in parts if part]
    if words:
        words[0] = " " + words[0]
    return words
