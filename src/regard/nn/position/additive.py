"""Learned position embeddings, and position vectors added to queries, keys and values."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.checks import check_count
from regard.nn.core import Site
from regard.nn.embedding import Sinusoidal
from regard.nn.mask import View
from regard.nn.position.base import Additive, AdditiveTable, Position, PositionTerms, positions_of
from regard.nn.terms import Terms


@dataclass(frozen=True, slots=True)
class Learned(Additive):
    """Position embeddings: a learned vector for each of `max_len` positions (Gehring et al. 2017, BERT, GPT-2)."""

    kind = "learned"
    max_len: int = 512

    def check(self) -> None:
        check_count("max_len", self.max_len)

    def build(self, site: Site, width: int) -> AdditiveTable:
        return LearnedModule(self.max_len, width, site)


class LearnedModule(AdditiveTable):
    def __init__(self, max_len: int, width: int, site: Site) -> None:
        super().__init__()
        self.weight = site.parameter(max_len, width, role="position")
        self.site = site

    def forward(self, positions: Int[Tensor, "b T"], bound: int) -> Float[Tensor, "b T W"]:
        length = self.weight.shape[0]
        if bound > length:
            raise self.site.error("max_len", f"a sequence of {bound} tokens exceeds the {length} learned positions")
        return nn.functional.embedding(positions, self.weight)


@dataclass(frozen=True, slots=True)
class Injected(Position):
    """Position vectors added to queries, keys and values in every layer: q + p_i, k + p_j, v + p_j (CS 224n).

    p_i is the vector of position i. Unlike vectors added to the input, it is not multiplied by the projections.
    """

    kind = "injected"
    shaped_by = ("heads", "kv_heads", "d_head", "d_value")
    scores_pairs = False
    table: Additive = Sinusoidal()

    def build(self, site: Site) -> PositionTerms:
        site.require(
            site.d_head == site.d_value,
            "kind",
            f"the same vector is added to keys and values, but d_head is {site.d_head} and d_value {site.d_value}",
        )
        return InjectedModule(self.table.build(site.inside("table"), site.heads * site.d_head))


class InjectedModule(PositionTerms):
    def __init__(self, table: AdditiveTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, view: View) -> Terms:
        at = positions_of(view)
        return Terms(offset=self.table(at.q, at.bound))
