"""Metrics of likelihood: loss, perplexity and bits per byte."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from regard.errors import DataError
from regard.evaluation.metric import Likelihood, Metric

LARGEST_EXPONENT = 709  # exp(710) overflows float64


class Loss(Metric):
    """Mean negative log-likelihood in nats per token, without label smoothing or auxiliary losses."""

    name = title = "loss"
    needs = "likelihood"
    higher_is_better = False
    digits = 3

    def segment(self, output: Likelihood, references: Sequence[object]) -> Sequence[float | int]:  # noqa: ARG002
        return output.nll, output.tokens

    def value(self, total: Float[np.ndarray, " K"]) -> float:
        return total[0] / total[1]


LOSS = Loss()


class Perplexity(Loss):
    """exp(nll / tokens), with the summed negative log-likelihood nll in nats."""

    name = title = "perplexity"
    digits = 2

    def value(self, total: Float[np.ndarray, " K"]) -> float:
        nll, tokens = total
        if tokens < 1:
            raise DataError(f"tokens: perplexity needs at least 1, not {tokens:.0f}")
        mean = nll / tokens
        return math.exp(mean) if mean < LARGEST_EXPONENT else math.inf


class BitsPerByte(Loss):
    """nll / (bytes * ln 2), with the summed negative log-likelihood nll in nats; comparable across vocabularies."""

    name = "bits_per_byte"
    title = "bits per byte"
    heading = "bits/byte"

    def segment(self, output: Likelihood, references: Sequence[object]) -> Sequence[float | int]:  # noqa: ARG002
        return output.nll, output.bytes

    def value(self, total: Float[np.ndarray, " K"]) -> float:
        nll, size = total
        if size < 1:
            raise DataError(f"byte_count: bits per byte need at least 1 byte, not {size:.0f}")
        return nll / (size * math.log(2))
