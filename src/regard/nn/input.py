"""Base classes of input layers, which map token ids or vectors to the hidden states before the first block."""

from abc import abstractmethod
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.checks import require
from regard.nn.core import Site
from regard.nn.vocab.tables import Table
from regard.tree import Spec


class InputSpec(Spec):
    """Abstract base class of specs for input layers, which map token ids or vectors to hidden states."""

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
        """Return the input spec for the source or the target. By default, both have this spec."""
        return self

    def table_width(self, d_model: int) -> int:
        """Return the width of the token embeddings. This method is not called if the input reads vectors."""
        return d_model

    @abstractmethod
    def build(self, site: Site) -> "Input":
        """Build the input layer with the sizes and weight factories of `site`."""


def check_join(join: str, has_position: bool, position_width: int | None) -> None:
    """Raise a `SpecError` if `position_width` is missing where position vectors are concatenated, or set elsewhere."""
    name, complete = "position_width", has_position and position_width is not None
    require(join == "add" or complete, name, 'join="concat" needs a position and the number of its channels')
    unused = "an added position is as wide as the model; leave it out"
    require(join != "add" or position_width is None, name, unused)


def channels_left(d_model: int, position_width: int | None) -> int:
    """Return the width of token embeddings beside concatenated position vectors of `position_width` channels."""
    width = d_model - (position_width or 0)
    message = f"{position_width} leaves {width} of {d_model} channels for tokens"
    require(1 <= width <= d_model, "input.position_width", message)
    return width


class Input(nn.Module):
    """Abstract base class of input layers. They are built by an `InputSpec`."""

    @abstractmethod
    def forward(
        self,
        values: Int[Tensor, "B T"] | Float[Tensor, "B T C"],
        table: Table,
        positions: Int[Tensor, "b T"],
        bound: int,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return the hidden states of `values` (token ids or vectors). All `positions` are less than `bound`."""
