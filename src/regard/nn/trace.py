"""Trace: the attention weights of a forward pass."""

from jaxtyping import Float
from torch import Tensor


class Trace:
    """Attention weights recorded in a forward pass: `weights["decoder.cross"][n]` belongs to the n-th call.

    In a decoding session, the calls of each step are appended to those of earlier steps.
    """

    def __init__(self) -> None:
        self.weights: dict[str, list[Tensor]] = {}

    def add(self, name: str, weights: Float[Tensor, "B H T S"]) -> None:
        """Record the weights of one call of the attention `name`."""
        self.weights.setdefault(name, []).append(weights)
