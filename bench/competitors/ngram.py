"""An n-gram language model with modified interpolated Kneser-Ney smoothing (Chen and Goodman, 1998).

    python bench/competitors/ngram.py X.train X.test --unit words --out ngram.json

Units are words and line ends, or characters (including line feeds). The order of the model is chosen on the last tenth
of the training text; the final model is trained on the whole text. The output is one JSON object: the negative
log-likelihood of the test text in nats, the number of unknown units, and the time in seconds.
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
    """Return the words of a text, with the end of every line as a word, or the characters of the text."""
    if unit == "characters":
        return list(text)
    return [word for line in text.removesuffix("\n").split("\n") for word in (*line.split(), END)]


def numbered(units: Sequence[str], vocabulary: dict[str, int]) -> np.ndarray:
    """Return the ids of the units. Units that are not in the vocabulary get the id of UNKNOWN."""
    unknown = vocabulary[UNKNOWN]
    return np.array([vocabulary.get(unit, unknown) for unit in units], dtype=np.int64)


def vocabulary_of(units: Sequence[str]) -> dict[str, int]:
    """Return ids for the line feed, for UNKNOWN (which some texts contain as a word) and for all units of a text."""
    return {unit: number for number, unit in enumerate(dict.fromkeys((END, UNKNOWN, *units)))}


def lookup(keys: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the index of each query in the sorted `keys`, or 0 if it is missing; whether it is present)."""
    if not len(keys):
        return np.zeros(len(queries), np.int64), np.zeros(len(queries), bool)
    index = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    present = keys[index] == queries
    return np.where(present, index, 0), present


@dataclass(frozen=True)
class Order:
    """The counts of all n-grams of one length n, sorted by key = context * |V| + word, with |V| the vocabulary size.

    The context is the index of the (n-1)-gram before the word. The probability of the word w after the context h is
    p_n(w|h) = (c(hw) - D(c(hw))) / c(h) + left(h) p_{n-1}(w|h'). Here c are counts, D are discounts, h' is h without
    its first word, and left(h) = sum_w D(c(hw)) / c(h).
    """

    keys: np.ndarray
    discounted: np.ndarray  # c(hw) - D(c(hw)) for every key
    total: np.ndarray  # c(h) for every context
    left: np.ndarray  # left(h) for every context


@dataclass(frozen=True)
class KneserNey:
    """An n-gram model over ids below `size`."""

    size: int
    orders: list[Order]

    @classmethod
    def counted(cls, ids: np.ndarray, size: int, order: int) -> "KneserNey":
        """Return the model of a text.

        For the longest n-grams, all occurrences count. For shorter n-grams, the different preceding words count.
        """
        keys: list[np.ndarray] = []  # for every n: the different n-grams
        numbers: list[np.ndarray] = []  # for every n: the index of the n-gram that ends at each position
        firsts: list[np.ndarray] = []  # for every n: the first position at which each n-gram ends
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
        """Return the probability of every id of a text, given the ids before it."""
        p = np.full(len(ids), 1 / self.size)
        context, known = np.zeros(len(ids), np.int64), np.ones(len(ids), bool)  # for this order, at every position
        for order in self.orders:
            index, present = lookup(order.keys, context * self.size + ids)
            present &= known
            mass = np.where(known, order.total[context], 0)
            higher = np.where(present, order.discounted[index], 0) / np.maximum(mass, 1)
            p = np.where(mass > 0, higher + order.left[context] * p, p)
            context, known = before(index), before(present, False)
        return p


def before(values: np.ndarray, first: int | bool = 0) -> np.ndarray:
    """Shift values by one position to the right: n-grams that end before a word are contexts for the next order."""
    return np.concatenate([np.full(1, first, values.dtype), values[:-1]])


def smoothed(keys: np.ndarray, counts: np.ndarray, size: int, contexts: int) -> Order:
    """Return the counts with three discounts: for n-grams that occur once, twice, and more often."""
    frequencies = [int((counts == n).sum()) for n in range(1, 5)]
    discounts = np.zeros(4)
    if all(frequencies):
        y = frequencies[0] / (frequencies[0] + 2 * frequencies[1])
        discounts[1:] = [n - (n + 1) * y * frequencies[n] / frequencies[n - 1] for n in (1, 2, 3)]
    else:  # too little text for the formula
        discounts[1:] = 0.5
    discounts = np.clip(discounts, 0, [0, 1, 2, 3])
    taken = discounts[np.minimum(counts, 3)]
    context = keys // size
    total = np.bincount(context, counts, contexts)
    left = np.bincount(context, taken, contexts) / np.maximum(total, 1)
    return Order(keys, counts - taken, total, left)


def nats(train: np.ndarray, test: np.ndarray, size: int, order: int) -> float:
    """Return -log p of a test text under a model of the training text, in nats."""
    return float(-np.log(KneserNey.counted(train, size, order).probabilities(test)).sum())


def main() -> None:
    """Choose the order, train, evaluate, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--unit", choices=ORDERS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    train, test = (units_of(path.read_text(encoding="utf-8"), options.unit) for path in (options.train, options.test))
    cut = 9 * len(train) // 10
    known = vocabulary_of(train[:cut])
    first, held_out = numbered(train[:cut], known), numbered(train[cut:], known)
    order = min(ORDERS[options.unit], key=lambda order: nats(first, held_out, len(known), order))
    vocabulary = vocabulary_of(train)
    results = {
        "steps": None,
        "nll": nats(numbered(train, vocabulary), numbered(test, vocabulary), len(vocabulary), order),
        "train_seconds": time.perf_counter() - START,
        "decode_seconds": 0.0,
        "choice": {"order": order},
        "unknown": sum(unit not in vocabulary for unit in test),
    }
    options.out.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
