"""An even sample of a text whose size is not known before it has been read."""

from collections.abc import Sequence

Record = tuple[str, ...]

GOLDEN = 2_654_435_769  # 2^32 divided by the golden ratio: its multiples cover 0 .. 2^32 evenly, however many there are
WHOLE = 1 << 32


class Sample:
    """Records that make up about `most` characters, from all over the text, or all of it if it is smaller.

    Record n of a text has the place n x golden ratio (modulo 1), and those of the lowest places are kept: the same ones
    whenever the same text is read.
    """

    def __init__(self, texts: Sequence[int], most: int) -> None:
        """`texts` says which texts of a record count."""
        self.texts, self.most = texts, most
        self.characters = 0  # of the whole text
        self._below, self._held = WHOLE, 0
        self._kept: list[tuple[int, int, int, Record, int]] = []  # place, corpus, number, record, characters

    def offer(self, corpus: int, number: int, record: Record) -> None:
        """Read one record; they come in order."""
        size = sum([len(record[text]) for text in self.texts])
        self.characters += size
        place = number * GOLDEN % WHOLE
        if place < self._below:
            self._kept.append((place, corpus, number, record, size))
            self._held += size
            if self._held > 2 * self.most:
                self._below //= 2
                self._kept = [kept for kept in self._kept if kept[0] < self._below]
                self._held = sum(kept[-1] for kept in self._kept)

    def records(self, held_out: Sequence[bytes] | None = None) -> tuple[list[Record], float]:
        """The sample in the order of the text, and its share of the text; `held_out` marks records not to be taken."""
        left = [kept for kept in self._kept if held_out is None or not held_out[kept[1]][kept[2]]]
        if self._below == WHOLE and self._held <= self.most:
            return [kept[3] for kept in left], 1.0
        taken, size = [], 0
        for kept in sorted(left, key=lambda kept: kept[:3]):
            if size >= self.most:
                break
            taken.append(kept)
            size += kept[-1]
        return [kept[3] for kept in sorted(taken, key=lambda kept: kept[1:3])], size / self.characters
