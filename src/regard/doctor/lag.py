"""Align the lines of two texts: find the lines at which one text begins to be shifted against the other.

Translations have similar lengths, the same numbers and often the same final punctuation. For every line and every lag,
the cost of a pair is minus the log-likelihood ratio of these features between a translation and a random pair. The
cheapest sequence of lags (Viterbi), in which every change of the lag costs `CHANGE`, divides the text into spans.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NEAR = 10  # lags up to this number of lines are always tried
PEAKS = 6  # number of more distant lags that are tried, found by the cross-correlation of the lengths
BLOCK = 8  # lines per step of the search; ends of spans are then refined line by line
CHANGE = 40.0  # cost of a change of the lag, in nats
CLEAR = 0.5  # nats per line by which a lag must be better than chance; translations are better by 1.5 or more
SMALLEST = 20  # shortest text that is aligned, in lines
SOFT = 5.0  # characters added to both lengths of a pair, because short lines differ more
NUMBER, NO_NUMBER = 3.0, 0.5  # gain of equal numbers, loss of unequal ones
AGREE = 0.9  # probability that translations end in the same punctuation
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Span:
    """Source lines `first` to `last` (exclusive) with the same lag: line i belongs to target line i + `lag`."""

    first: int
    last: int
    lag: int


@dataclass(frozen=True)
class Features:
    """The features of lines: length in characters, the digits of all numbers (0: none), final punctuation."""

    lengths: np.ndarray
    numbers: np.ndarray
    endings: np.ndarray

    @classmethod
    def of(cls, lines: Sequence[str]) -> "Features":
        """Return the features of the lines of a text."""
        lengths = np.fromiter(map(len, lines), np.float64, len(lines))
        numbers = np.fromiter((_numbers(line) for line in lines), np.int64, len(lines))
        endings = np.fromiter((_ending(line) for line in lines), np.int64, len(lines))
        return cls(lengths, numbers, endings)


def _numbers(line: str) -> int:
    digits = _DIGITS.findall(line)
    # Sorted, because languages write dates and separators of thousands differently.
    return 1 + int("".join(sorted("".join(digits), reverse=True))[:18]) if digits else 0


def _ending(line: str) -> int:
    last = line.rstrip()[-1:]
    return ord(last) if last and not last.isalnum() else 0


def spans(source: Sequence[str], target: Sequence[str]) -> list[Span]:
    """Return the spans of equal lag that cover the source. Without a shift, this is one span with lag 0."""
    if min(len(source), len(target)) < SMALLEST:
        return [Span(0, len(source), 0)]
    one, other = Features.of(source), Features.of(target)
    lags = candidates(one.lengths, other.lengths)
    costs, chance = pair_costs(one, other, lags)
    chosen = plausible(cheapest(costs), costs, chance)
    found = [Span(0, len(source), int(lags[chosen[0]]))]
    for block in (np.flatnonzero(np.diff(chosen)) + 1).tolist():
        before, after = int(chosen[block - 1]), int(chosen[block])
        at = max(found[-1].first, _refined(costs[:, before] - costs[:, after], block * BLOCK))
        found[-1] = Span(found[-1].first, at, found[-1].lag)
        found.append(Span(at, len(source), int(lags[after])))
    return found


def candidates(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the lags to try, 0 first: small lags, the difference of the line counts, and peaks of the correlation."""
    lags = [0, *(sign * lag for lag in range(1, NEAR + 1) for sign in (1, -1))]
    difference = len(target) - len(source)
    lags += [difference + lag for lag in range(-2, 3)]
    size = 1 << (len(source) + len(target)).bit_length()
    quarter = -(-len(source) // 4)
    whole = np.fft.rfft(_standard(target), size)
    for first in range(0, len(source), quarter):
        part = np.zeros(len(source))
        part[first : first + quarter] = _standard(source[first : first + quarter])
        correlation = np.fft.irfft(whole * np.conj(np.fft.rfft(part, size)), size)
        peaks = np.argsort(correlation)[-PEAKS // 2 :]
        lags += [int(peak) if peak < size // 2 else int(peak) - size for peak in peaks]
    kept = dict.fromkeys(lag for lag in lags if -len(source) + SMALLEST < lag < len(target) - SMALLEST)
    return np.asarray(list(kept))


def _standard(lengths: np.ndarray) -> np.ndarray:
    logs = np.log(lengths + SOFT)
    return (logs - logs.mean()) / max(1e-9, logs.std())


def pair_costs(source: Features, target: Features, lags: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the cost of pairing each source line (rows) with the target line at each lag (columns), and a chance cost.

    The chance cost is the mean cost of random pairs.
    """
    ratio = np.log((target.lengths.mean() + SOFT) / (source.lengths.mean() + SOFT))
    count = len(source.lengths)
    residuals = np.full((count, len(lags) + 1), np.nan)
    costs = np.zeros((count, len(lags) + 1))
    same, other = _ending_gains(source.endings, target.endings)
    lines = np.arange(count)
    paired = [lines + lag for lag in lags.tolist()]
    paired.append(np.resize(np.random.default_rng(0).permutation(len(target.lengths)), count))
    for column, other_lines in enumerate(paired):
        here = lines[(other_lines >= 0) & (other_lines < len(target.lengths))]
        there = other_lines[here]
        residuals[here, column] = np.log((target.lengths[there] + SOFT) / (source.lengths[here] + SOFT)) - ratio
        equal = source.numbers[here] == target.numbers[there]
        numbers = np.where(source.numbers[here] != 0, np.where(equal, -NUMBER, NO_NUMBER), 0.0)
        endings = np.where(source.endings[here] == target.endings[there], -same, -other)
        costs[here, column] = numbers + endings
    spread = max(0.05, float(np.nanmin(1.4826 * np.nanmedian(np.abs(residuals), axis=0))))
    costs += _length_cost(residuals / spread)
    chance = float(np.nanmean(costs[:, -1]))
    return np.where(np.isnan(costs), chance, costs)[:, :-1], chance


def _ending_gains(source: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """Return log-likelihood ratios, translation against random pair, of equal and of unequal final punctuation."""
    counts, others = Counter(source.tolist()), Counter(target.tolist())
    chance = sum(counts[mark] * others[mark] for mark in counts) / (len(source) * len(target))
    if chance >= AGREE:
        return 0.0, 0.0
    chance = max(0.05, chance)
    return float(np.log(AGREE / chance)), float(np.log((1 - AGREE) / (1 - chance)))


def _length_cost(residuals: np.ndarray) -> np.ndarray:
    """Return the negative log-density of residuals under a mixture of two normal distributions.

    The weights are 0.9 and 0.1, and the second standard deviation is four times the first.
    """
    narrow = 0.9 * np.exp(-0.5 * residuals**2)
    wide = 0.1 / 4 * np.exp(-0.5 * (residuals / 4) ** 2)
    return -np.log(narrow + wide + 1e-3)


def cheapest(costs: np.ndarray) -> np.ndarray:
    """Return the cheapest sequence of lags (Viterbi), as one lag index per block of lines.

    Every change of the lag costs `CHANGE`, and so does a first lag other than 0.
    """
    starts = np.arange(0, len(costs), BLOCK)
    blocks = np.add.reduceat(costs, starts, axis=0)
    total = blocks[0] + CHANGE * (np.arange(blocks.shape[1]) != 0)
    back = np.empty(blocks.shape, np.int32)
    stay = np.arange(blocks.shape[1])
    for number in range(1, len(blocks)):
        best = int(total.argmin())
        changes = total > total[best] + CHANGE
        back[number] = np.where(changes, best, stay)
        total = np.where(changes, total[best] + CHANGE, total) + blocks[number]
    chosen = np.empty(len(blocks), np.int64)
    chosen[-1] = int(total.argmin())
    for number in range(len(blocks) - 1, 0, -1):
        chosen[number - 1] = back[number, chosen[number]]
    return chosen


def plausible(chosen: np.ndarray, costs: np.ndarray, chance: float) -> np.ndarray:
    """Set a lag to 0 if its cost is hardly below the chance cost, which means that the lines are unrelated."""
    kept = chosen.copy()
    for lag in np.unique(chosen[chosen != 0]):
        lines = np.repeat(chosen == lag, BLOCK)[: len(costs)]
        if costs[lines, lag].mean() > chance - CLEAR:
            kept[chosen == lag] = 0
    return kept


def _refined(gains: np.ndarray, near: int, reach: int = 10 * BLOCK) -> int:
    """Return the line at which the lag changes. `gains` is the cost of the later lag minus that of the earlier one."""
    first, last = max(0, near - reach), min(len(gains), near + reach)
    before = np.concatenate([[0.0], np.cumsum(gains[first:last])])
    return first + int(before.argmin())


def correlation(source: np.ndarray, target: np.ndarray) -> float:
    """Return the correlation of the logarithms of two sequences of lengths, or 0 if one of them is constant."""
    one, other = np.log(source + SOFT), np.log(target + SOFT)
    if one.std() < 1e-6 or other.std() < 1e-6:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])
