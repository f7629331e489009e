"""A Kneser-Ney n-gram language model over token ids, in numpy: a baseline that takes seconds."""

from dataclasses import dataclass

import numpy as np

from regard.data.token_store import Column

FALLBACK = (0.0, 0.5, 1.0, 1.5)  # discounts where a text is too small or too regular to estimate them


@dataclass(frozen=True)
class _Order:
    """The counts of one order n: of n-grams, and of their contexts, which are the (n - 1)-grams."""

    keys: np.ndarray  # (n-grams,) sorted: number of the context x (vocabulary + 1) + last token
    discounted: np.ndarray  # (n-grams,) c(hw) - D(c(hw))
    total: np.ndarray  # (contexts,) c(h .), summed over all tokens that follow
    backoff: np.ndarray  # (contexts,) sum_w D(c(hw)) / c(h .): the weight of the lower order


class KneserNey:
    """Interpolated modified Kneser-Ney model (Kneser and Ney, 1995; Chen and Goodman, 1999) of rows of token ids.

    p_n(w | h) = (c(hw) - D(c(hw))) / c(h .)  +  [sum_v D(c(hv)) / c(h .)]  p_{n-1}(w | h'),      p_0 = 1 / vocabulary,

    where h' is h without its first token, and an unseen h leaves p_{n-1} as it is. c counts occurrences at the highest
    order, and below it the different tokens that precede an n-gram. D has one value each for counts of 1, 2 and more.
    The first token of a row is read and not predicted, as by the language models of this package; the places before it
    hold a padding symbol.
    """

    def __init__(self, rows: Column, vocabulary: int, order: int) -> None:
        self.vocabulary, self.order = vocabulary, order
        self._orders: list[_Order] = []
        tokens, predicted = self._laid(rows)
        grams = [np.zeros(len(tokens), np.int64)]  # of each length, the number of the n-gram that ends at each token
        keys = []
        for _ in range(order):
            found, numbers = np.unique(self._keys(grams[-1], tokens), return_inverse=True)
            keys.append(found)
            grams.append(numbers)
        places = predicted
        for n in range(order, 0, -1):
            numbers = grams[n][places]
            found = np.full(len(keys[n - 1]), -1, np.int64)  # one place of each n-gram
            found[numbers] = places
            contexts = np.where(found < 0, 0, grams[n - 1][found - 1])
            counts = np.bincount(numbers, minlength=len(found))
            self._orders.insert(0, _order(keys[n - 1], counts, contexts, 1 if n == 1 else len(keys[n - 2])))
            places = found[found >= 0]  # from here on, types of n-grams are counted, not occurrences

    def log_probs(self, rows: Column) -> np.ndarray:
        """Return the natural logarithm of the probability of each token of each row but the first, in order."""
        tokens, predicted = self._laid(rows)
        gram = np.zeros(len(tokens), np.int64)
        p = np.full(len(predicted), 1 / self.vocabulary)
        for counts in self._orders:
            keys = self._keys(gram, tokens)
            context = np.roll(gram, 1)[predicted]
            at = np.minimum(np.searchsorted(counts.keys, keys), len(counts.keys) - 1)
            gram = np.where(counts.keys[at] == keys, at, -1)
            here = gram[predicted]
            seen = (context >= 0) & (counts.total[context] > 0)
            own = np.where(here >= 0, counts.discounted[here], 0.0)
            p = np.where(seen, own / np.maximum(counts.total[context], 1) + counts.backoff[context] * p, p)
        return np.log(p)

    def _laid(self, rows: Column) -> tuple[np.ndarray, np.ndarray]:
        """Return all tokens with padding before every row, and the places of those that are predicted."""
        before = (self.vocabulary,) * (self.order - 1)
        laid = rows.between(before, ())
        tokens = np.asarray(laid.ids).astype(np.int64)
        read = np.zeros(len(tokens), np.bool_)
        for place in range(self.order):
            read[(laid.offsets[:-1] + place)[laid.lengths > place]] = True
        return tokens, np.flatnonzero(~read)

    def _keys(self, shorter: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return a key for every n-gram: the number of the (n - 1)-gram before its last token, and that; -1: unseen."""
        context = np.roll(shorter, 1)
        return np.where(context < 0, -1, context * (self.vocabulary + 1) + tokens)


def _order(keys: np.ndarray, counts: np.ndarray, contexts: np.ndarray, size: int) -> _Order:
    discount = discounts(counts)[np.minimum(counts, 3)]
    total = np.bincount(contexts, counts, size)
    return _Order(keys, counts - discount, total, np.bincount(contexts, discount, size) / np.maximum(total, 1))


def discounts(counts: np.ndarray) -> np.ndarray:
    """Return the discounts of counts 0, 1, 2 and at least 3, estimated from the numbers of counts 1, 2, 3 and 4.

    D_i = i - (i + 1) Y n_{i+1} / n_i with Y = n_1 / (n_1 + 2 n_2) (Chen and Goodman, 1999).
    """
    n = [float((counts == i).sum()) for i in range(5)]
    if not all(n[1:4]):
        return np.asarray(FALLBACK)
    y = n[1] / (n[1] + 2 * n[2])
    found = [i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3)]
    return np.asarray([0.0, *found]) if all(0 < d < i for i, d in enumerate(found, 1)) else np.asarray(FALLBACK)
