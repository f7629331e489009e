"""Position terms: what a position scheme adds to attention."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Terms:
    """What a position scheme adds to attention. Fields that the scheme does not use are None."""

    rotation: Callable[[Tensor], Tensor] | None = None  # applied to queries and keys (B, H, T, K)
    offset: Float[Tensor, "b T W"] | None = None  # added to queries, keys and values
    bias: Float[Tensor, "b H T S"] | None = None  # added to the scores, independent of the content
    by_distance: Callable[[Tensor], Tensor] | None = None  # the bias as a function of distances j - i: (*n) -> (H, *n)
    content: Callable[[Tensor], Tensor] | None = None  # scores that depend on the query: (B, H, T, K) -> (B, H, T, S)
    context: Callable[[Tensor], Tensor] | None = None  # added to the output: weights -> (B, H, T, V)
