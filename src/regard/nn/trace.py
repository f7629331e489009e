"""Trace: the attention weights and the expert routing of a forward pass."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class Route(NamedTuple):
    """The experts, or memory values, that a layer chose for each token: K of `total` per head. Experts have 1 head."""

    chosen: Int[Tensor, "B T H K"]
    weights: Float[Tensor, "B T H K"]  # the weight of each expert's output; 0 for padding
    total: int


class Trace:
    """Attention weights recorded in a forward pass: `weights["decoder.cross"][n]` is from cross-attention layer n.

    `routes["encoder.experts"][n]` is the routing of the n-th layer with experts in the encoder; product-key memories
    are in `routes["encoder.memory"]`. In decoding, the weights of each step are appended to those of earlier steps.
    """

    rows: slice | None = None  # the queries whose weights are recorded; None: all

    def __init__(self) -> None:
        self.weights: dict[str, list[Tensor]] = {}
        self.routes: dict[str, list[Route]] = {}

    def clear(self) -> None:
        """Discard everything that is recorded."""
        self.weights.clear()
        self.routes.clear()

    def wants(self, name: str, shape: Sequence[int]) -> bool:  # noqa: ARG002
        """Return whether the weights of the next layer `name` are recorded. All have the shape (B, H, T, S).

        An attention layer calls this once per forward pass, before it computes the weights.
        """
        return True

    def add(self, name: str, weights: Float[Tensor, "B H T S"]) -> None:
        """Append the weights of one attention layer to the list `name`, such as "decoder.cross"."""
        self.weights.setdefault(name, []).append(weights)

    def route(self, name: str, chosen: Int[Tensor, "B T H K"], weights: Float[Tensor, "B T H K"], total: int) -> None:
        """Append the routing of one layer to the list `name`, such as "encoder.experts"."""
        self.routes.setdefault(name, []).append(Route(chosen.detach(), weights.detach(), total))
