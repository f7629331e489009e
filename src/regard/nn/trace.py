"""Trace: the attention weights of a forward pass."""

from jaxtyping import Float
from torch import Tensor


class Trace:
    """Attention weights recorded beside the forward pass: `weights["decoder.cross"][n]` belongs to the n-th call.

    In a decoding the calls of every step follow each other, each with the rows of that step.
    """

    def __init__(self) -> None:
        self.weights: dict[str, list[Tensor]] = {}

    def add(self, name: str, weights: Float[Tensor, "B H T S"]) -> None:
        """Record one call."""
        self.weights.setdefault(name, []).append(weights)
