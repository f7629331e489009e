"""Vocabulary tables, which provide the token embeddings and the output matrix of a model."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.checks import check_count
from regard.nn.core import Site
from regard.tree import Spec


class TableSpec(Spec):
    """Abstract base class of specs for vocabulary tables (token embeddings and output matrix)."""

    __slots__ = ()

    @abstractmethod
    def build(self, vocab: int, width: int, site: Site) -> "Table":
        """Build a table with a vector of `width` channels for each of `vocab` ids."""


class Table(nn.Module):
    """Abstract base class of embedding tables. The output head uses a table to map hidden states to logits."""

    @abstractmethod
    def forward(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n W"]:
        """Return the embedding vectors of `ids`."""

    @abstractmethod
    def readout(self, h: Float[Tensor, "*n W"]) -> tuple[Float[Tensor, "*n R"], Float[Tensor, "V R"]]:
        """Return r and M such that the logits are r M'. With these, a head can compute the loss in chunks."""

    def logits(self, h: Float[Tensor, "*n W"]) -> Float[Tensor, "*n V"]:
        """Return the logit of every id."""
        r, matrix = self.readout(h)
        return r @ matrix.T


@dataclass(frozen=True, slots=True)
class Embeddings(TableSpec):
    """A table with one full-width vector per id."""

    kind = "embeddings"

    def build(self, vocab: int, width: int, site: Site) -> Table:
        return EmbeddingsModule(vocab, width, site)


class EmbeddingsModule(nn.Embedding, Table):  # type: ignore[reportIncompatibleMethodOverride]
    """`nn.Embedding`, initialised by the init spec. `weight` has one row per id."""

    def __init__(self, vocab: int, width: int, site: Site) -> None:
        weight = site.parameter(vocab, width, role="embedding")
        super().__init__(vocab, width, _weight=weight)
        self.weight = weight

    def readout(self, h: Float[Tensor, "*n W"]) -> tuple[Float[Tensor, "*n R"], Float[Tensor, "V R"]]:
        return h, self.weight


@dataclass(frozen=True, slots=True)
class Factorised(TableSpec):
    """E = A B': a vector of `width` channels per id (A), and one projection (B) of all vectors. Lan et al. 2020.

    The init spec initialises A as an embedding table and B as a projection. Then A and B are rescaled so that their
    product A B' stays the same. With `T5Init`, both have standard deviation width^-1/4, as in Narang et al. 2021.
    """

    kind = "factorised"
    width: int

    def check(self) -> None:
        check_count("width", self.width)

    def build(self, vocab: int, width: int, site: Site) -> Table:
        return FactorisedModule(vocab, self.width, width, site)


class FactorisedModule(Table):
    def __init__(self, vocab: int, narrow: int, width: int, site: Site) -> None:
        super().__init__()
        self.weight = site.parameter(vocab, narrow, role="embedding")
        self.projection = site.parameter(width, narrow, role="other")
        with torch.no_grad():
            self.weight.mul_(narrow**-0.25)
            self.projection.mul_(narrow**0.25)

    def forward(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n W"]:
        return nn.functional.embedding(ids, self.weight) @ self.projection.T

    def readout(self, h: Float[Tensor, "*n W"]) -> tuple[Float[Tensor, "*n R"], Float[Tensor, "V R"]]:
        return h @ self.projection, self.weight


@dataclass(frozen=True, slots=True)
class Sharing(Spec):
    """Weight tying of the source, target and output tables of an encoder-decoder. Press & Wolf 2017."""

    kind = "sharing"
    source_target: bool = True
    input_output: bool = True  # the target table is also the softmax matrix
    positions: bool = False  # source and target share the position and norm parameters of the input
