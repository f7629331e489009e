"""Input slot: from token ids, or from vectors, to the first hidden states."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.core import MOST_CHANNELS, Site, check_count
from regard.nn.norm import NoNorm, Norm
from regard.nn.position.additive import Sinusoidal
from regard.nn.position.base import Additive
from regard.nn.vocab.tables import Table
from regard.tree import Spec


class InputSpec(Spec):
    """Slot: describes how a side's values become its first hidden states."""

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


@dataclass(frozen=True, slots=True)
class Tokens(InputSpec):
    """Token embeddings: drop(norm(scale * E[id] + P[position] + types)).

    `join="concat"` appends the position instead (CS 182, choice 1), as the last `position_width` channels.

    Word dropout (Iyyer et al. 2015): in training, E[id] is 0 with probability `word_dropout`, drawn for every token;
    its position and type stay. Unlike dropout it does not rescale the other tokens, which keep their size relative to
    their positions. Differs from the paper: a mean over tokens counts the dropped ones too.
    """

    kind = "tokens"
    scaled: bool = True  # E times sqrt(d_model), as Vaswani et al. 2017
    position: Additive | None = Sinusoidal()
    join: Literal["add", "concat"] = "add"
    position_width: int | None = None  # concat only
    norm: Norm = NoNorm()
    types: int = 0  # token types with a learned vector each: BERT's sentence A and B
    word_dropout: float = 0.0

    def check(self) -> None:
        if self.join == "concat" and (self.position is None or self.position_width is None):
            raise SpecError("position_width", "concatenation needs a position and the number of channels it gets")
        if self.join == "add" and self.position_width is not None:
            raise SpecError("position_width", "an added position is as wide as the model; leave it out or concatenate")
        if self.types < 0:
            raise SpecError("types", f"must not be negative, not {self.types}")
        if not 0.0 <= self.word_dropout < 1.0:
            raise SpecError("word_dropout", f"must lie in [0, 1), not {self.word_dropout}")

    @property
    def token_types(self) -> int:
        return self.types

    def table_width(self, d_model: int) -> int:
        width = d_model - (self.position_width or 0)
        if width < 1 or width > d_model:
            raise SpecError(
                "input.position_width", f"{self.position_width} leaves {width} of {d_model} channels for tokens"
            )
        return width

    def build(self, site: Site) -> Input:
        return TokensModule(self, site)


class TokensModule(Input):
    """The module of `Tokens`. The vocabulary table is an argument, for it may be shared."""

    def __init__(self, spec: Tokens, site: Site) -> None:
        super().__init__()
        width = site.d_model if spec.join == "add" else spec.position_width or 0
        self.position = None if spec.position is None else spec.position.build(site.inside("position"), width)
        self.types = site.parameter(spec.types, site.d_model, role="embedding") if spec.types else None
        self.norm = spec.norm.build(site.inside("norm"))
        self.factor = site.d_model**0.5 if spec.scaled else None
        self.appended, self.dropout, self.site = spec.join == "concat", nn.Dropout(site.dropout), site
        self.word_dropout = spec.word_dropout

    def forward(
        self,
        values: Int[Tensor, "B T"],
        table: Table,
        positions: Int[Tensor, "b T"],
        bound: int,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        return self.dropout(self.embed(values, table, positions, bound, types))

    def embed(
        self,
        ids: Int[Tensor, "B T"],
        table: Table,
        positions: Int[Tensor, "b T"],
        bound: int,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The sum of token, position and type embeddings, normalised."""
        x = table.embed(ids)
        if self.training and self.word_dropout > 0.0:
            dropped = torch.rand(ids.shape, dtype=torch.float32, device=ids.device) < self.word_dropout
            x = x.masked_fill(dropped[..., None], 0.0)
        if self.factor is not None:
            x = x * self.factor
        if self.position is not None:
            place = self.position(positions, bound).to(x.dtype)
            x = torch.cat((x, place.expand(x.shape[0], -1, -1)), -1) if self.appended else x + place
        if self.types is not None:  # without types in the batch, all are 0
            x = x + (self.types[0] if types is None else nn.functional.embedding(types, self.types))
        elif types is not None:
            raise self.site.error("types", "this input does not distinguish token types; drop them from the batch")
        return self.norm(x)


@dataclass(frozen=True, slots=True)
class Vectors(InputSpec):
    """A sequence of vectors, such as audio frames, image patches or measurements: drop(norm(W x + b + P[position])).

    The batch holds floats (B, T, `channels`) on this side, and the model has no vocabulary table there.
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
    """The module of `Vectors`."""

    def __init__(self, spec: Vectors, site: Site) -> None:
        super().__init__()
        self.linear = site.linear(spec.channels, {"other": site.d_model}, bias=True)
        self.position = None if spec.position is None else spec.position.build(site.inside("position"), site.d_model)
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
    """Different inputs for source and target: a source of vectors and a target of tokens, for example."""

    kind = "by_side"
    source: InputSpec
    target: InputSpec = Tokens()

    @property
    def token_types(self) -> int:
        return max(self.source.token_types, self.target.token_types)

    def of(self, side: Literal["source", "target"]) -> InputSpec:
        return self.source if side == "source" else self.target

    def build(self, site: Site) -> Input:
        raise site.error("kind", "'by_side' needs a model with two sides; give this one the input itself")
