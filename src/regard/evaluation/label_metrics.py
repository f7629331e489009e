"""Metrics of predicted classes: accuracy and Matthews correlation."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from regard.evaluation.metric import Metric


class Accuracy(Metric):
    """Percentage of predictions that are equal to the label."""

    name = title = "accuracy"
    needs = "labels"
    proportion = True
    unit = " %"

    def segment(self, output: Hashable, references: Sequence[Hashable]) -> Sequence[float | int]:
        return output == references[0], 1

    def value(self, total: Float[np.ndarray, " K"]) -> float:
        return 100 * total[0] / total[1]


class Matthews(Metric):
    """Correlation of predicted and true classes, from -1 to 1 (Matthews, 1975; for K classes Gorodkin, 2004).

    The value is (c * s - sum_k p_k * t_k) / sqrt((s^2 - sum_k p_k^2) * (s^2 - sum_k t_k^2)). Here c of the s
    predictions are right, class k is predicted p_k times, and t_k examples have the label k. The value is 0 if all
    predictions or all labels are one class.
    """

    name = "matthews"
    title = "Matthews correlation"
    needs = "labels"
    digits = 3

    def statistics(self, outputs: Sequence[Any], references: Sequence[Any] = ()) -> Float[np.ndarray, "N K"]:
        """Return one row per example: (1 if right else 0, 1, one-hot predicted class, one-hot label), concatenated."""
        pairs = [(output, label) for output, (label,) in self.pairs(outputs, references)]
        classes = {name: number for number, name in enumerate(dict.fromkeys(name for pair in pairs for name in pair))}
        one_hot = np.eye(len(classes))
        return np.array([[p == t, 1, *one_hot[classes[p]], *one_hot[classes[t]]] for p, t in pairs], dtype=np.float64)

    def value(self, total: Float[np.ndarray, " K"]) -> float:
        c, s, *counts = (int(number) for number in total)
        p, t = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        spread = (s * s - sum(n * n for n in p)) * (s * s - sum(n * n for n in t))
        return (c * s - sum(a * b for a, b in zip(p, t, strict=True))) / math.sqrt(spread) if spread else 0.0
