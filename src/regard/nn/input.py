"""Input slot: from token ids, or from vectors, to the first hidden states."""

from abc import abstractmethod
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.core import Site
from regard.nn.vocab.tables import Table
from regard.tree import Spec


class InputSpec(Spec):
    """Slot: maps the token ids or vectors of a side to its first hidden states."""

    __slots__ = ()

    @property
    def token_types(self) -> int:
        """Number of token types that it distinguishes; 0: none."""
        return 0

    @property
    def vector_channels(self) -> int:
        """Width of the vectors that it reads; 0: it reads token ids through a vocabulary table."""
        return 0

    def of(self, side: Literal["source", "target"]) -> "InputSpec":  # noqa: ARG002
        """The input of one side; by default the same for both."""
        return self

    def table_width(self, d_model: int) -> int:
        """Width of the vectors that it takes from a vocabulary table; not called where it reads vectors."""
        return d_model

    @abstractmethod
    def build(self, site: Site) -> "Input":
        """The module for this site."""


class Input(nn.Module):
    """Abstract: the module of an `InputSpec`."""

    @abstractmethod
    def forward(
        self,
        values: Int[Tensor, "B T"] | Float[Tensor, "B T C"],
        table: Table,
        positions: Int[Tensor, "b T"],
        bound: int,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The first hidden states. All positions are below `bound`; `types` are token types, if the input has any."""
