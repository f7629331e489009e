"""Table slot: the vocabulary matrix in both directions."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.checks import check_count
from regard.nn.core import Site
from regard.tree import Spec


class TableSpec(Spec):
    """Slot: describes a vocabulary table."""

    __slots__ = ()

    @abstractmethod
    def build(self, vocab: int, width: int, site: Site) -> "Table":
        """A table of `vocab` rows for vectors of `width`."""


class Table(nn.Module):
    """Abstract: ids to vectors, and vectors to one score per id. Owned once; heads receive it as an argument."""

    @abstractmethod
    def forward(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n W"]:
        """The vectors of `ids`."""

    @abstractmethod
    def readout(self, h: Float[Tensor, "*n W"]) -> tuple[Float[Tensor, "*n R"], Float[Tensor, "V R"]]:
        """(r, M) with logits = r M'. A head works through them in chunks, so the logits need never exist at once."""

    def logits(self, h: Float[Tensor, "*n W"]) -> Float[Tensor, "*n V"]:
        """The score of every id."""
        r, matrix = self.readout(h)
        return r @ matrix.T


@dataclass(frozen=True, slots=True)
class Embeddings(TableSpec):
    """One row per id."""

    kind = "embeddings"

    def build(self, vocab: int, width: int, site: Site) -> Table:
        return EmbeddingsModule(vocab, width, site)


class EmbeddingsModule(nn.Embedding, Table):  # type: ignore[reportIncompatibleMethodOverride]
    """torch's embedding, its weights drawn by the init slot: `weight` has one row per id."""

    def __init__(self, vocab: int, width: int, site: Site) -> None:
        weight = site.parameter(vocab, width, role="embedding")
        super().__init__(vocab, width, _weight=weight)
        self.weight = weight

    def readout(self, h: Float[Tensor, "*n W"]) -> tuple[Float[Tensor, "*n R"], Float[Tensor, "V R"]]:
        return h, self.weight


@dataclass(frozen=True, slots=True)
class Factorised(TableSpec):
    """E = A B': a narrow row per id, and one projection for all of them. Lan et al. 2020.

    The init slot draws A as a table and B as a projection; the scale is then split evenly between them, which leaves
    the product as it is. Under T5's init both have standard deviation width^-1/4, as in Narang et al. 2021.
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
    """Which of the three tables of an encoder-decoder (source, target, output) are one. Press & Wolf 2017."""

    kind = "sharing"
    source_target: bool = True
    input_output: bool = True  # the target's table is also the softmax matrix
    positions: bool = False  # source and target share what the input slot learns: positions, norm
