"""Input slot: from ids to the first stream."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.norm import NoNorm, Norm
from regard.nn.position.additive import Sinusoidal
from regard.nn.position.base import Additive
from regard.nn.vocab.tables import Table
from regard.tree import Spec


class InputSpec(Spec):
    """Slot: describes how the stream begins."""

    __slots__ = ()

    @property
    def kinds(self) -> int:
        """How many kinds of tokens it tells apart; 0: none."""
        return 0

    @abstractmethod
    def table_width(self, d_model: int) -> int:
        """The width of the vectors it takes from a vocabulary table."""

    @abstractmethod
    def build(self, site: Site) -> "Input":
        """The module at the head of this site's stream."""


class Input(nn.Module):
    """Abstract: the module an InputSpec builds."""

    @abstractmethod
    def forward(
        self,
        ids: Int[Tensor, "B T"],
        table: Table,
        positions: Int[Tensor, "b T"],
        bound: int,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The stream at these ids and positions; `types` is the kind of each token where the input tells them apart."""


@dataclass(frozen=True, slots=True)
class Tokens(InputSpec):
    """drop(norm(scale * E[id] + P[position] + types)).

    `join="concat"` appends the position instead (CS 182, choice 1): the last `position_width` channels of the stream.

    Word dropout (Iyyer et al. 2015): in training, E[id] is 0 with probability `word_dropout`, drawn for every token;
    its position and type stay. Unlike dropout it does not rescale what is kept: a token weighs the same beside its
    position in training and in evaluation. Differs from the paper: a mean over tokens counts the dropped ones too.
    """

    kind = "tokens"
    scaled: bool = True  # E times sqrt(d_model), as Vaswani et al. 2017
    position: Additive | None = Sinusoidal()
    join: Literal["add", "concat"] = "add"
    position_width: int | None = None  # concat only
    norm: Norm = NoNorm()
    types: int = 0  # kinds of tokens told apart by a learned vector: BERT's sentence A and B
    word_dropout: float = 0.0

    def check(self) -> None:
        if self.join == "concat" and (self.position is None or self.position_width is None):
            raise SpecError("position_width", "concatenation needs a position and the number of channels it gets")
        if self.join == "add" and self.position_width is not None:
            raise SpecError("position_width", "an added position is as wide as the stream; leave it out or concatenate")
        if self.types < 0:
            raise SpecError("types", f"must not be negative, not {self.types}")
        if not 0.0 <= self.word_dropout < 1.0:
            raise SpecError("word_dropout", f"must lie in [0, 1), not {self.word_dropout}")

    @property
    def kinds(self) -> int:
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
    """The module that Tokens builds."""

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
        ids: Int[Tensor, "B T"],
        table: Table,
        positions: Int[Tensor, "b T"],
        bound: int,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        return self.dropout(self.embed(ids, table, positions, bound, types))

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
        if self.types is not None:
            # Text of one kind needs no types: they are all 0.
            x = x + (self.types[0] if types is None else nn.functional.embedding(types, self.types))
        elif types is not None:
            raise self.site.error("types", "this input does not tell kinds of tokens apart; drop them from the batch")
        return self.norm(x)
