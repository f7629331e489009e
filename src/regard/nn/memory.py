"""Memory: the encoder output that a decoder attends to."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Memory:
    """The encoder output that a decoder attends to."""

    x: tuple[Float[Tensor, "b S D"], ...]  # one tensor for all decoder blocks, or one for each block
    seg: Int[Tensor, "b S"] | None = None  # segment (text) of each token, 0: padding; None: no padding
