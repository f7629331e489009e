"""A language model by counting: n-grams with modified interpolated Kneser-Ney smoothing (Chen and Goodman, 1998).

    python bench/competitors/ngram.py X.train X.test --unit words --out ngram.json

Units are the words of a line and its end, or characters (the line feed is one). The order is chosen on the last tenth
of the training text; the model then counts all of it. Writes one JSON document: nats of the test text, units, seconds.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

START = time.perf_counter()
END, UNKNOWN = "\n", "<unk>"
ORDERS = {"words": (3, 4, 5), "characters": (5, 6, 7, 8)}


def units_of(text: str, unit: str) -> list[str]:
    """Words with the end of every line as a word, or characters."""
    if unit == "characters":
        return list(text)
    return [word for line in text.removesuffix("\n").split("\n") for word in (*line.split(), END)]


def numbered(units: Sequence[str], vocabulary: dict[str, int]) -> np.ndarray:
    """Ids; what the vocabulary does not have is UNKNOWN."""
    unknown = vocabulary[UNKNOWN]
    return np.array([vocabulary.get(unit, unknown) for unit in units], dtype=np.int64)


def vocabulary_of(units: Sequence[str]) -> dict[str, int]:
    """All units of a text, the line feed first, and UNKNOWN, which some texts have as a word already."""
    return {unit: number for number, unit in enumerate(dict.fromkeys((END, UNKNOWN, *units)))}


def found_in(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each wanted key its index among sorted keys (0 if it is not there), and whether it is there."""
    if not len(keys):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    there = keys[index] == wanted
    return np.where(there, index, 0), there


@dataclass(frozen=True)
class Order:
    """The counts of n-grams of one length n, sorted by key = context x |V| + word.

    The context is the number of an (n-1)-gram among those of the order below. With c the counts and D the discounts,
    p_n(w|h) = (c(hw) - D(c(hw))) / c(h) + left(h) p_{n-1}(w|h'), where h' is h without its first word and
    left(h) = sum_w D(c(hw)) / c(h).
    """

    keys: np.ndarray
    discounted: np.ndarray  # c(hw) - D(c(hw)), of each key
    total: np.ndarray  # c(h), of each context
    left: np.ndarray  # of each context


@dataclass(frozen=True)
class KneserNey:
    """An n-gram model over ids below `size`."""

    size: int
    orders: list[Order]

    @classmethod
    def counted(cls, ids: np.ndarray, size: int, order: int) -> "KneserNey":
        """The model of a text.

        The highest order counts n-grams; a lower one counts the different words that precede its n-grams.
        """
        keys: list[np.ndarray] = []  # of each order, the different n-grams
        numbers: list[np.ndarray] = []  # of each order, which n-gram ends at each place
        firsts: list[np.ndarray] = []  # of each order, where each n-gram is first seen to end
        context = np.zeros(len(ids), np.int64)
        for _ in range(order):
            different, first, number = np.unique(context * size + ids, return_index=True, return_inverse=True)
            keys.append(different)
            firsts.append(first)
            numbers.append(number)
            context = before(number)
        orders = []
        for n in range(order):
            places = np.arange(len(ids)) if n == order - 1 else firsts[n + 1]
            counts = np.bincount(numbers[n][places], minlength=len(keys[n]))
            orders.append(smoothed(keys[n], counts, size, len(keys[n - 1]) if n else 1))
        return cls(size, orders)

    def probabilities(self, ids: np.ndarray) -> np.ndarray:
        """p of every id of a text, given those before it."""
        found = np.full(len(ids), 1 / self.size)
        context, known = np.zeros(len(ids), np.int64), np.ones(len(ids), bool)  # of the order, at each place
        for order in self.orders:
            index, there = found_in(order.keys, context * self.size + ids)
            there &= known
            mass = np.where(known, order.total[context], 0)
            higher = np.where(there, order.discounted[index], 0) / np.maximum(mass, 1)
            found = np.where(mass > 0, higher + order.left[context] * found, found)
            context, known = before(index), before(there, False)
        return found


def before(values: np.ndarray, first: int | bool = 0) -> np.ndarray:
    """What stands at the place before each: n-grams that end there are the contexts of the next order."""
    return np.concatenate([np.full(1, first, values.dtype), values[:-1]])


def smoothed(keys: np.ndarray, counts: np.ndarray, size: int, contexts: int) -> Order:
    """Counts of one order with their three discounts, of n-grams that are seen once, twice and more often."""
    seen = [int((counts == n).sum()) for n in range(1, 5)]
    discounts = np.zeros(4)
    if all(seen):
        y = seen[0] / (seen[0] + 2 * seen[1])
        discounts[1:] = [n - (n + 1) * y * seen[n] / seen[n - 1] for n in (1, 2, 3)]
    else:  # too little text for the formula
        discounts[1:] = 0.5
    discounts = np.clip(discounts, 0, [0, 1, 2, 3])
    taken = discounts[np.minimum(counts, 3)]
    context = keys // size
    total = np.bincount(context, counts, contexts)
    left = np.bincount(context, taken, contexts) / np.maximum(total, 1)
    return Order(keys, counts - taken, total, left)


def nats(train: np.ndarray, test: np.ndarray, size: int, order: int) -> float:
    """-log p of a test text by a model of the training text."""
    return float(-np.log(KneserNey.counted(train, size, order).probabilities(test)).sum())


def main() -> None:
    """Choose the order, count, measure, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--unit", choices=ORDERS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    train, test = (units_of(path.read_text(encoding="utf-8"), given.unit) for path in (given.train, given.test))
    cut = 9 * len(train) // 10
    known = vocabulary_of(train[:cut])
    first, held_out = numbered(train[:cut], known), numbered(train[cut:], known)
    order = min(ORDERS[given.unit], key=lambda order: nats(first, held_out, len(known), order))
    vocabulary = vocabulary_of(train)
    found = {
        "steps": None,
        "nll": nats(numbered(train, vocabulary), numbered(test, vocabulary), len(vocabulary), order),
        "train_seconds": time.perf_counter() - START,
        "decode_seconds": 0.0,
        "choice": {"order": order},
        "unknown": sum(unit not in vocabulary for unit in test),
    }
    given.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
