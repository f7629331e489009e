"""Baseline for classification: multinomial logistic regression on the TF-IDF values of words and word bigrams."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.scripts import words

PENALTY = 0.1  # L2 regularisation: the factor of half the squared weights, added to the summed losses of all texts
ITERATIONS = 60
WEIGHTS = 5_000_000  # the maximum of features x classes; the rarest features are dropped


class _Sparse:
    """A sparse matrix with `count` rows in compressed row format, made from entries in any order."""

    def __init__(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, count: int) -> None:
        order = np.argsort(rows, kind="stable")
        self.columns = torch.from_numpy(columns[order])
        self.values = torch.from_numpy(values[order].astype(np.float32))
        self.starts = torch.from_numpy(np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))]))

    def times(self, dense: Tensor) -> Tensor:
        return F.embedding_bag(
            self.columns, dense, self.starts, mode="sum", per_sample_weights=self.values, include_last_offset=True
        )


class BagOfWords:
    """Logistic regression on TF-IDF features of lower-case words and pairs of adjacent words.

    The value of feature t in a text is tf(t) * (1 + ln((1 + n) / (1 + df(t)))). Here tf(t) is the number of times that
    t occurs in the text, n is the number of texts, and df(t) is the number of texts that contain t. The values of each
    text are divided by their Euclidean norm. L-BFGS finds the weights W that minimise the summed cross-entropy plus
    PENALTY / 2 * |W|^2. The bias is not penalised.
    """

    def __init__(self, texts: Sequence[str], labels: np.ndarray, classes: int) -> None:
        split = [words(text) for text in texts]
        self._words = {word: number for number, word in enumerate(dict.fromkeys(chain.from_iterable(split)))}
        rows, keys = self._grams(split)
        self._keys, columns = np.unique(keys, return_inverse=True)
        documents = np.bincount(_counted(rows, columns, len(self._keys))[1])
        kept = np.sort(np.argsort(-documents, kind="stable")[: max(1, WEIGHTS // classes)])
        self._keys = self._keys[kept]
        self._idf = 1 + np.log((1 + len(texts)) / (1 + documents[kept]))
        self._weights = self._trained(*self._features(rows, keys, len(texts)), labels, classes)

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        """Return the most probable class of each text."""
        rows, columns, values = self._features(*self._grams([words(text) for text in texts]), len(texts))
        scores = _Sparse(rows, columns, values, len(texts)).times(self._weights[:-1]) + self._weights[-1]
        return scores.argmax(1).numpy()

    def _grams(self, texts: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the text indices and feature keys of all known words, then of all pairs of adjacent known words."""
        unknown, size = len(self._words), len(self._words) + 1
        numbers = np.fromiter((self._words.get(word, unknown) for word in chain.from_iterable(texts)), np.int64)
        rows = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        known = numbers != unknown
        pairs = (rows[1:] == rows[:-1]) & known[1:] & known[:-1]
        keys = (numbers[:-1] + 1) * size + numbers[1:]  # greater than the keys of single words
        return np.concatenate([rows[known], rows[1:][pairs]]), np.concatenate([numbers[known], keys[pairs]])

    def _features(self, rows: np.ndarray, keys: np.ndarray, texts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the text indices, feature indices and TF-IDF values of all known features."""
        columns = np.searchsorted(self._keys, keys)
        known = np.append(self._keys, -1)[columns] == keys
        rows, columns, counts = _counted(rows[known], columns[known], len(self._keys))
        values = counts * self._idf[columns]
        norms = np.sqrt(np.bincount(rows, values * values, texts))
        return rows, columns, values / norms[rows]

    def _trained(
        self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, labels: np.ndarray, classes: int
    ) -> Tensor:
        """Return the trained weights: one row for each feature, then one row with the biases."""
        x = _Sparse(rows, columns, values, len(labels))
        transposed = _Sparse(columns, rows, values, len(self._keys))
        y = torch.from_numpy(np.eye(classes, dtype=np.float32)[labels])
        weights = torch.zeros(len(self._keys) + 1, classes, dtype=torch.float32)
        solver = torch.optim.LBFGS(
            [weights], max_iter=ITERATIONS, history_size=10, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            log_p = (x.times(weights[:-1]) + weights[-1]).log_softmax(1)
            error = log_p.exp() - y
            slope = torch.cat([transposed.times(error) + PENALTY * weights[:-1], error.sum(0, keepdim=True)])
            weights.grad = slope / len(y)
            return (PENALTY / 2 * weights[:-1].square().sum() - (y * log_p).sum()) / len(y)

        with torch.no_grad():
            solver.step(closure)
        return weights


def _counted(rows: np.ndarray, columns: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows and columns of the distinct pairs (row, column), sorted, and how often each pair occurs."""
    places, counts = np.unique(rows * width + columns, return_counts=True)
    return places // width, places % width, counts
