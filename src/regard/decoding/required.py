"""Lexically constrained decoding, in which an output must contain given sequences (Post & Vilar 2018)."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

Ids = tuple[int, ...]
Item = TypeVar("Item")
MOST = 10  # maximum number of required sequences per row, which limits the states to 2^10 sets of missing sequences


class Progress(NamedTuple):
    """The part of the required sequences that an output contains so far (a state of `Required`)."""

    met: frozenset[int]  # the indices of the required sequences that the output contains
    tail: Ids  # the longest suffix of the output that is a prefix of a required sequence


class Required:
    """Automaton (Aho & Corasick 1975) that computes how many more tokens an output needs to contain all sequences.

    `distance` is exact and takes overlaps into account: if (a b) and (b c) are required, three tokens are enough. To
    complete a sequence s next, the output needs the tokens of s that are not already in its tail (see `Progress`). The
    distance is therefore

        distance(met, tail) = min over s not met of  |s| - overlap(tail, s) + distance(after these tokens).
    """

    def __init__(self, sequences: Sequence[Ids]) -> None:
        # A sequence inside another one needs no separate state, because both are completed together.
        self.sequences = [s for s in sequences if not any(s != other and contains(other, s) for other in sequences)]
        self.beginnings = {s[:i] for s in self.sequences for i in range(len(s) + 1)} | {()}
        self.alphabet = sorted({token for s in self.sequences for token in s})
        self.start = Progress(frozenset(), ())
        self._distances: dict[Progress, int] = {}
        self._useful: dict[Progress, Ids] = {}

    def step(self, progress: Progress, token: int) -> Progress:
        """Return the progress of an output after one more token."""
        tail = (*progress.tail, token)
        while tail not in self.beginnings:
            tail = tail[1:]
        completed = {i for i, s in enumerate(self.sequences) if tail[-len(s) :] == s}
        return Progress(progress.met | completed, tail)

    def follow(self, progress: Progress, tokens: Sequence[int]) -> Progress:
        for token in tokens:
            progress = self.step(progress, token)
        return progress

    def distance(self, progress: Progress) -> int:
        """Return the minimum number of tokens to append, so that the output contains all sequences."""
        if len(progress.met) == len(self.sequences):
            return 0
        if progress not in self._distances:
            missing = [s for i, s in enumerate(self.sequences) if i not in progress.met]
            rests = [s[_overlap(progress.tail, s) :] for s in missing]
            self._distances[progress] = min(len(rest) + self.distance(self.follow(progress, rest)) for rest in rests)
        return self._distances[progress]

    def useful(self, progress: Progress) -> Ids:
        """Return the tokens that, appended to the output, reduce the `distance` to an output with all sequences."""
        if progress not in self._useful:
            now = self.distance(progress)
            self._useful[progress] = tuple(t for t in self.alphabet if self.distance(self.step(progress, t)) < now)
        return self._useful[progress]


@lru_cache(maxsize=256)
def automaton(sequences: tuple[Ids, ...]) -> Required:
    """Return the automaton for the given sequences. Automata are cached, because rows often share their sequences."""
    return Required(sequences)


def contains(sequence: Sequence[int], part: Sequence[int]) -> bool:
    """Return whether `part` is a contiguous part of `sequence`."""
    n = len(part)
    return any(tuple(sequence[i : i + n]) == tuple(part) for i in range(len(sequence) - n + 1))


def _overlap(tail: Ids, s: Ids) -> int:
    """Return the length of the longest suffix of `tail` that is a proper prefix of `s`."""
    return next(n for n in range(min(len(tail), len(s) - 1), -1, -1) if tail[len(tail) - n :] == s[:n])


def allocate(ranked: Sequence[Item], places: int, missing: Callable[[Item], int]) -> list[Item]:
    """Choose at most `places` items by dynamic beam allocation, and return them in the order of `ranked`.

    `missing(item)` is the number of tokens that an item still needs. Items with the same number form a bank. The banks
    take turns, beginning with the fewest missing tokens. In each turn, a bank contributes its best remaining item.
    """
    banks: dict[int, list[int]] = {}
    for i, item in enumerate(ranked):
        banks.setdefault(missing(item), []).append(i)
    waiting = [banks[distance][::-1] for distance in sorted(banks)]
    chosen: list[int] = []
    while waiting and len(chosen) < places:
        chosen += [bank.pop() for bank in waiting[: places - len(chosen)]]
        waiting = [bank for bank in waiting if bank]
    return [ranked[i] for i in sorted(chosen)]
