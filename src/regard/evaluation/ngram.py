"""Kneser-Ney n-gram language model over token ids, in numpy: a baseline that trains in seconds."""

from dataclasses import dataclass

import numpy as np

from regard.data.token_store import Column

FALLBACK = (0.0, 0.5, 1.0, 1.5)  # discounts for a text that is too small or too regular to estimate them


@dataclass(frozen=True)
class _Order:
    """Discounted counts of the n-grams of one order n, and total counts of their contexts (the first n - 1 tokens)."""

    keys: np.ndarray  # (n-grams,) sorted: index of the context x (vocabulary + 1) + last token
    discounted: np.ndarray  # (n-grams,) c(hw) - D(c(hw))
    total: np.ndarray  # (contexts,) c(h .) = sum_w c(hw), over all next tokens w
    backoff: np.ndarray  # (contexts,) sum_w D(c(hw)) / c(h .): the weight of the lower order


class KneserNey:
    """Interpolated modified Kneser-Ney language model (Kneser and Ney, 1995; Chen and Goodman, 1999) of token ids.

    p_n(w | h) = (c(hw) - D(c(hw))) / c(h .)  +  [sum_v D(c(hv)) / c(h .)]  p_{n-1}(w | h'),      p_0 = 1 / vocabulary,

    where w is a token, h are the n - 1 tokens before w, h' is h without its first token, and c(h .) = sum_v c(hv). If h
    does not occur, p_n = p_{n-1}. At the highest order, c counts occurrences. At lower orders, c counts the distinct
    tokens that precede an n-gram. The discount D has three values: for a count of 1, of 2, and of 3 or more. As in the
    language models of this package, the first token of a text is not predicted. Padding precedes the first token.
    """

    def __init__(self, rows: Column, vocabulary: int, order: int) -> None:
        self.vocabulary, self.order = vocabulary, order
        self._orders: list[_Order] = []
        tokens, predicted = self._laid(rows)
        grams = [np.zeros(len(tokens), np.int64)]  # grams[n][i]: the index of the n-gram that ends at token i
        keys = []
        for _ in range(order):
            distinct, numbers = np.unique(self._keys(grams[-1], tokens), return_inverse=True)
            keys.append(distinct)
            grams.append(numbers)
        places = predicted
        for n in range(order, 0, -1):
            numbers = grams[n][places]
            ends = np.full(len(keys[n - 1]), -1, np.int64)  # one position at which each n-gram ends
            ends[numbers] = places
            contexts = np.where(ends < 0, 0, grams[n - 1][ends - 1])
            counts = np.bincount(numbers, minlength=len(ends))
            self._orders.insert(0, _order(keys[n - 1], counts, contexts, 1 if n == 1 else len(keys[n - 2])))
            places = ends[ends >= 0]  # lower orders count distinct n-grams, not occurrences

    def log_probs(self, rows: Column) -> np.ndarray:
        """Return the natural log-probabilities of all tokens in order, except the first token of each text."""
        tokens, predicted = self._laid(rows)
        gram = np.zeros(len(tokens), np.int64)
        p = np.full(len(predicted), 1 / self.vocabulary)
        for counts in self._orders:
            keys = self._keys(gram, tokens)
            context = np.roll(gram, 1)[predicted]
            at = np.minimum(np.searchsorted(counts.keys, keys), len(counts.keys) - 1)
            gram = np.where(counts.keys[at] == keys, at, -1)
            here = gram[predicted]
            known = (context >= 0) & (counts.total[context] > 0)
            own = np.where(here >= 0, counts.discounted[here], 0.0)
            p = np.where(known, own / np.maximum(counts.total[context], 1) + counts.backoff[context] * p, p)
        return np.log(p)

    def _laid(self, rows: Column) -> tuple[np.ndarray, np.ndarray]:
        """Return all tokens, with padding before every text, and the indices of the tokens that are predicted."""
        padded = rows.between((self.vocabulary,) * (self.order - 1), ())
        tokens = np.asarray(padded.ids).astype(np.int64)
        first = np.zeros(len(tokens), np.bool_)  # the padding and the first token of each row
        for place in range(self.order):
            first[(padded.offsets[:-1] + place)[padded.lengths > place]] = True
        return tokens, np.flatnonzero(~first)

    def _keys(self, shorter: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return, for each token, an integer key of the n-gram that ends with the token.

        `shorter` holds one index per token: the index of the (n - 1)-gram that ends with this token, or -1 if that
        (n - 1)-gram is not in the training text. The returned key of a token is -1 if the (n - 1)-gram that ends with
        the preceding token is not in the training text.
        """
        context = np.roll(shorter, 1)
        return np.where(context < 0, -1, context * (self.vocabulary + 1) + tokens)


def _order(keys: np.ndarray, counts: np.ndarray, contexts: np.ndarray, size: int) -> _Order:
    discount = discounts(counts)[np.minimum(counts, 3)]
    total = np.bincount(contexts, counts, size)
    return _Order(keys, counts - discount, total, np.bincount(contexts, discount, size) / np.maximum(total, 1))


def discounts(counts: np.ndarray) -> np.ndarray:
    """Return the discounts for n-grams with a count of 0, 1, 2, and at least 3.

    D_i = i - (i + 1) * Y * n_{i+1} / n_i with Y = n_1 / (n_1 + 2 * n_2). Here n_i is the number of entries of `counts`
    that equal i (Chen and Goodman, 1999).
    """
    n = [float((counts == i).sum()) for i in range(5)]
    if not all(n[1:4]):
        return np.asarray(FALLBACK)
    y = n[1] / (n[1] + 2 * n[2])
    values = [i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3)]
    return np.asarray([0.0, *values] if all(0 < d < i for i, d in enumerate(values, 1)) else FALLBACK)
