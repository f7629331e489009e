"""Encode a corpus word by word with a cache, because a corpus has only about one distinct word per hundred words.

A byte-level BPE never merges across a space or a line feed. The ids of a text are therefore the concatenated ids of its
words, where a word includes the space before it.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from regard.data.token_store import Column
from regard.errors import DataError

MAX_WORDS = 1 << 19  # a cache with more words is cleared, to limit the use of memory
# Split before a space that follows a word, and around a line feed. Python's white space includes all that the
# tokenizer treats as white space, so no sequence of white space is split.
CUT = re.compile(r"(?<=\S)(?= )|(?=\n)|(?<=\n)")


class WordMemory(dict[str, int]):
    """A cache of the token ids of words. The dict maps the key of a word to the index of its ids in a column.

    The key of a word that follows a space is the word without the space: the key of " of" is "of". The key of any other
    word begins with a space: the key of "of" is " of". Most words follow a space, so most words from `str.split` are
    keys without a change.
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
        """Return the token ids of every text as a column. The ids are the same as those from `encode`."""
        if len(self) > MAX_WORDS:
            self._reset()
        ends = [0]

        def keys() -> Iterator[list[str]]:
            for text in texts:  # one text at a time, because the words of all texts would need much memory
                words = _keys(text)
                ends.append(ends[-1] + len(words))
                yield words

        numbers = np.fromiter(map(self.__getitem__, chain.from_iterable(keys())), np.int64)
        try:
            self._encode_new()
        except DataError:  # encode the texts, for an error with the number of the text
            self._reset()
            return Column.of(self._encode(texts))
        words = self._ids.take(numbers)
        return Column(words.ids, words.offsets[ends])

    def _reset(self) -> None:
        self.clear()
        self._ids = Column.of([])

    def _encode_new(self) -> None:
        new, self._new = self._new, []
        added = Column.of(self._encode([key[1:] if key.startswith(" ") else " " + key for key in new]))
        ids = np.concatenate([self._ids.ids[:], added.ids[:]])
        self._ids = Column(ids, np.concatenate([self._ids.offsets, self._ids.offsets[-1] + added.offsets[1:]]))


def _keys(text: str) -> list[str]:
    words = text.split()
    if " ".join(words) != text:  # white space other than one space between words
        parts = CUT.split(text)
        return [part[1:] if part[:1] == " " and part[1:2] != " " else " " + part for part in parts if part]
    if words:
        words[0] = " " + words[0]
    return words
