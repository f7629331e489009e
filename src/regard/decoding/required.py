"""Lexically constrained decoding: sequences that an output must contain (Post & Vilar 2018)."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

Ids = tuple[int, ...]
Item = TypeVar("Item")
MOST = 10  # sequences of a row: the state has one of 2^10 sets of missing sequences


class Progress(NamedTuple):
    """The state of an output: the sequences that it contains, and the longest beginning of one at its end."""

    met: frozenset[int]
    tail: Ids


class Required:
    """An automaton over texts (Aho & Corasick 1975) that computes how many more tokens each one needs.

    `distance` is exact, overlaps included: with (a b) and (b c) required, three tokens are enough. After the tail, the
    next sequence to be completed needs those of its tokens that are not at its end already, so

        distance(met, tail) = min over s not met of  |s| - overlap(tail, s) + distance(after saying them).
    """

    def __init__(self, sequences: Sequence[Ids]) -> None:
        # A sequence inside another is met with it, so only the others are kept.
        self.sequences = [s for s in sequences if not any(s != other and _within(s, other) for other in sequences)]
        self.beginnings = {s[:i] for s in self.sequences for i in range(len(s) + 1)} | {()}
        self.alphabet = sorted({token for s in self.sequences for token in s})
        self.start = Progress(frozenset(), ())
        self._distances: dict[Progress, int] = {}
        self._useful: dict[Progress, Ids] = {}

    def step(self, progress: Progress, token: int) -> Progress:
        """Return the progress after one more token."""
        tail = (*progress.tail, token)
        while tail not in self.beginnings:
            tail = tail[1:]
        met = progress.met
        for i, s in enumerate(self.sequences):
            if i not in met and tail[len(tail) - len(s) :] == s:
                met = met | {i}
        return Progress(met, tail)

    def follow(self, progress: Progress, tokens: Sequence[int]) -> Progress:
        """Return the progress after some more tokens."""
        for token in tokens:
            progress = self.step(progress, token)
        return progress

    def distance(self, progress: Progress) -> int:
        """Return the fewest tokens after which nothing is missing."""
        if len(progress.met) == len(self.sequences):
            return 0
        if progress not in self._distances:
            options = []
            for i, s in enumerate(self.sequences):
                if i not in progress.met:
                    rest = s[_overlap(progress.tail, s) :]
                    options.append(len(rest) + self.distance(self.follow(progress, rest)))
            self._distances[progress] = min(options)
        return self._distances[progress]

    def useful(self, progress: Progress) -> Ids:
        """Return the tokens that reduce the distance."""
        if progress not in self._useful:
            now = self.distance(progress)
            self._useful[progress] = tuple(t for t in self.alphabet if self.distance(self.step(progress, t)) < now)
        return self._useful[progress]


@lru_cache(maxsize=256)
def automaton(sequences: tuple[Ids, ...]) -> Required:
    """Return the automaton of these sequences, cached because often all rows require the same."""
    return Required(sequences)


def _within(part: Ids, whole: Ids) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


def _overlap(tail: Ids, s: Ids) -> int:
    """Return the length of the longest end of `tail` that begins `s` without completing it."""
    return next(n for n in range(min(len(tail), len(s) - 1), -1, -1) if tail[len(tail) - n :] == s[:n])


def allocate(ranked: Sequence[Item], places: int, missing: Callable[[Item], int]) -> list[Item]:
    """Dynamic beam allocation: `places` of the ranked items, as evenly as possible over how much is missing in them.

    Items that miss the same number of tokens form a bank. Banks are served in turn, the nearest to completion first,
    each giving its best; a bank that has no more leaves its places to the others. The result keeps the ranking.
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
