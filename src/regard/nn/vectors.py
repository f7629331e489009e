"""Input layers for vectors, and different input layers for source and target."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.checks import MOST_CHANNELS, check_count
from regard.nn.core import Site, build_optional
from regard.nn.embedding import Sinusoidal, Tokens
from regard.nn.input import Input, InputSpec
from regard.nn.norm import NoNorm, Norm
from regard.nn.position.base import Additive
from regard.nn.vocab.tables import Table


@dataclass(frozen=True, slots=True)
class Vectors(InputSpec):
    """A sequence of vectors, such as audio frames, image patches or measurements: dropout(norm(W x + b + P[position])).

    The batch holds floats of shape (B, T, `channels`) instead of token ids, so the input needs no vocabulary table.
    """

    kind = "vectors"
    channels: int
    position: Additive | None = Sinusoidal()
    norm: Norm = NoNorm()

    def check(self) -> None:
        check_count("channels", self.channels, MOST_CHANNELS)

    @property
    def vector_channels(self) -> int:
        return self.channels

    def build(self, site: Site) -> Input:
        return VectorsModule(self, site)


class VectorsModule(Input):
    """The input layer built by `Vectors`."""

    def __init__(self, spec: Vectors, site: Site) -> None:
        super().__init__()
        self.linear = site.linear(spec.channels, {"other": site.d_model}, bias=True)
        self.position = build_optional(spec.position, site.inside("position"), site.d_model)
        self.norm, self.dropout, self.site = spec.norm.build(site.inside("norm")), nn.Dropout(site.dropout), site

    def forward(
        self,
        values: Float[Tensor, "B T C"],
        table: Table | None,  # noqa: ARG002
        positions: Int[Tensor, "b T"],
        bound: int,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        if types is not None:
            raise self.site.error("kind", "vectors have no token types; drop them from the batch")
        x = self.linear(values.to(next(self.linear.parameters()).dtype))
        if self.position is not None:
            x = x + self.position(positions, bound).to(x.dtype)
        return self.dropout(self.norm(x))


@dataclass(frozen=True, slots=True)
class BySide(InputSpec):
    """Different inputs for source and target, for example vectors for the source and tokens for the target."""

    kind = "by_side"
    source: InputSpec
    target: InputSpec = Tokens()

    @property
    def token_types(self) -> int:
        return max(self.source.token_types, self.target.token_types)

    def of(self, side: Literal["source", "target"]) -> InputSpec:
        return self.source if side == "source" else self.target

    def build(self, site: Site) -> Input:
        raise site.error("kind", "'by_side' needs a model with source and target; use one of its inputs directly")
