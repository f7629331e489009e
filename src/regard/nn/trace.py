"""Trace: the attention weights of a forward pass."""

from jaxtyping import Float
from torch import Tensor


class Trace:
    """Attention weights recorded in a forward pass: `weights["decoder.cross"][n]` is from cross-attention layer n.

    In decoding, the weights of each step are appended to those of earlier steps.
    """

    def __init__(self) -> None:
        self.weights: dict[str, list[Tensor]] = {}

    def add(self, name: str, weights: Float[Tensor, "B H T S"]) -> None:
        """Append the weights of one attention layer to the list `name`, such as "decoder.cross"."""
        self.weights.setdefault(name, []).append(weights)
