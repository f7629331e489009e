"""Sample training examples evenly from a text in one pass, without knowing the size of the text."""

from collections.abc import Sequence

Record = tuple[str, ...]

GOLDEN = 2_654_435_769  # 2^32 / golden ratio; for every n, the first n multiples of it are evenly spread modulo 2^32
WHOLE = 1 << 32


class Sample:
    """A deterministic sample of about `limit` characters, taken from all parts of a text.

    If the text has at most `limit` characters, the sample is the whole text. Otherwise, training example n has the rank
    n * golden ratio modulo 1, and the sample consists of the examples with the lowest ranks.
    """

    def __init__(self, texts: Sequence[int], limit: int) -> None:
        """Sample about `limit` characters. Only the strings with indices `texts` of each example are counted."""
        self.texts, self.limit = texts, limit
        self.characters = 0  # number of characters in the whole text
        self._below, self._size = WHOLE, 0
        self._kept: list[tuple[int, int, int, Record, int]] = []  # rank, corpus, number, record, characters

    def offer(self, corpus: int, number: int, record: Record) -> None:
        """Add training example `number` of a corpus to the sample if the rank of the example is low enough."""
        size = sum([len(record[text]) for text in self.texts])
        self.characters += size
        rank = number * GOLDEN % WHOLE
        if rank < self._below:
            self._kept.append((rank, corpus, number, record, size))
            self._size += size
            if self._size > 2 * self.limit:
                self._below //= 2
                self._kept = [kept for kept in self._kept if kept[0] < self._below]
                self._size = sum(kept[-1] for kept in self._kept)

    def records(self, held_out: Sequence[bytes] | None = None) -> tuple[list[Record], float]:
        """Return the sampled examples in the order of the text, and their share of all characters.

        `held_out`, if given, has one byte per example of each corpus. Examples with a nonzero byte are left out.
        """
        left = [kept for kept in self._kept if held_out is None or not held_out[kept[1]][kept[2]]]
        if self._below == WHOLE and self._size <= self.limit:
            return [kept[3] for kept in left], 1.0
        taken, size = [], 0
        for kept in sorted(left, key=lambda kept: kept[:3]):
            if size >= self.limit:
                break
            taken.append(kept)
            size += kept[-1]
        return [kept[3] for kept in sorted(taken, key=lambda kept: kept[1:3])], size / self.characters
