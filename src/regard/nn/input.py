"""The input slot: the specs that map token ids or vectors to the first hidden states."""

from abc import abstractmethod
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.core import Site
from regard.nn.vocab.tables import Table
from regard.tree import Spec


class InputSpec(Spec):
    """The input slot: the specs that map the token ids or vectors of a stack to the first hidden states."""

    __slots__ = ()

    @property
    def token_types(self) -> int:
        """Number of token types that the input distinguishes; 0 if it has no token types."""
        return 0

    @property
    def vector_channels(self) -> int:
        """Width of the vectors that the input reads; 0 if it reads token ids instead."""
        return 0

    def of(self, side: Literal["source", "target"]) -> "InputSpec":  # noqa: ARG002
        """Return the input for the source or the target. By default both have the same."""
        return self

    def table_width(self, d_model: int) -> int:
        """Return the width of the token embeddings. It is not called for an input that reads vectors."""
        return d_model

    @abstractmethod
    def build(self, site: Site) -> "Input":
        """Build the module for this site."""


class Input(nn.Module):
    """Abstract: the module built by an `InputSpec`."""

    @abstractmethod
    def forward(
        self,
        values: Int[Tensor, "B T"] | Float[Tensor, "B T C"],
        table: Table,
        positions: Int[Tensor, "b T"],
        bound: int,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return the first hidden states. All `positions` are below `bound`. `types` are the token types, if any."""
