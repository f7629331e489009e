"""Memory: the output of an encoder, for the decoder."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Memory:
    """The output of an encoder, for the decoder."""

    x: tuple[Float[Tensor, "b S D"], ...]  # one for all blocks, or one per decoder call
    seg: Int[Tensor, "b S"] | None = None
