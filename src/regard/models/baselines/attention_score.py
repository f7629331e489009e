"""AttentionScore slot: how the state of a recurrence looks something up in a table of others."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.attention import active, attend, merge_heads, mix, softmax, split_heads
from regard.nn.checks import check_count
from regard.nn.core import Site
from regard.nn.heads import Scale, attention_weights, beams_apart, beams_together, factor
from regard.nn.mask import View
from regard.tree import Spec


class AttentionScore(Spec):
    """Slot: how well a state fits each entry of a table, and what it takes from there. `heads` look-ups at a time."""

    __slots__ = ()

    @abstractmethod
    def build(self, d_query: int, d_memory: int, site: Site) -> "AttentionScoreModule":
        """A look-up by states of one width in a memory of another."""


@dataclass(frozen=True, slots=True)
class DotScore(AttentionScore):
    """Luong et al. 2015, dot: softmax(h' m_j) over the memory itself; nothing is learned. Heads share its channels."""

    kind = "dot"
    scale: Scale = "none"

    def build(self, d_query: int, d_memory: int, site: Site) -> "AttentionScoreModule":
        site.require(
            d_query == d_memory,
            "kind",
            f"a state of width {d_query} has no product with a memory of {d_memory}; map them",
        )
        return ProductScoreModule(nn.Identity(), None, (d_memory, d_memory), self.scale, site)


@dataclass(frozen=True, slots=True)
class BilinearScore(AttentionScore):
    """Luong et al. 2015, general: softmax(h' W m_j) over the memory itself. Heads share its channels."""

    kind = "bilinear"
    scale: Scale = "none"
    bias: bool | None = False

    def build(self, d_query: int, d_memory: int, site: Site) -> "AttentionScoreModule":
        query = site.linear(d_query, {"query": d_memory}, bias=self.bias)
        return ProductScoreModule(query, None, (d_memory, d_memory), self.scale, site)


@dataclass(frozen=True, slots=True)
class GeneralScore(AttentionScore):
    """Learned maps as in the CS 182 notes: q = W_q h, (k_j, v_j) = (W_k, W_v) m_j, sum_j softmax(scale q' k_j) v_j."""

    kind = "general"
    scale: Scale = "sqrt"
    bias: bool | None = None  # None: as the model's linear slot says

    def build(self, d_query: int, d_memory: int, site: Site) -> "AttentionScoreModule":
        width = site.heads * site.d_head
        query = site.linear(d_query, {"query": width}, bias=self.bias)
        table = site.linear(d_memory, {"key": width, "value": width}, bias=self.bias)
        return ProductScoreModule(query, table, (width, width), self.scale, site)


@dataclass(frozen=True, slots=True)
class AdditiveScore(AttentionScore):
    """Bahdanau et al. 2015: softmax(v' tanh(W_q h + W_k m_j)) over the memory itself. Heads share its channels.

    `normalised` (Salimans and Kingma 2016, as GNMT uses it): g v / |v| instead of v, and a bias within tanh.
    """

    kind = "additive"
    d_hidden: int | None = None  # of the comparison; None: d_model
    normalised: bool = False

    def check(self) -> None:
        check_count("d_hidden", self.d_hidden)

    def build(self, d_query: int, d_memory: int, site: Site) -> "AttentionScoreModule":
        return AdditiveScoreModule(self, d_query, d_memory, site)


class AttentionScoreModule(nn.Module):
    """Abstract: questions, a table of keys and values, and answers."""

    width: int  # of an answer
    heads: int
    dropout: float

    @abstractmethod
    def ask(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T K"]:
        """The questions of states."""

    @abstractmethod
    def table(self, memory: Float[Tensor, "B S M"]) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S V"]]:
        """Keys and values of what is looked at."""

    @abstractmethod
    def answer(
        self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], v: Float[Tensor, "B H S V"], view: View
    ) -> Float[Tensor, "B H T V"]:
        """What is found."""

    @abstractmethod
    def weights(self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], view: View) -> Float[Tensor, "B H T S"]:
        """How much of the answer comes from where: computed beside it for a trace."""


def check_heads(width: int, heads: int, what: str, site: Site) -> None:
    """Refuse channels that heads cannot share evenly."""
    site.require(
        width % heads == 0, "kind", f"{heads} heads cannot share the {width} channels of {what}; choose a divisor"
    )


class ProductScoreModule(AttentionScoreModule):
    """Scores that are products of queries and keys."""

    attend = staticmethod(attend)  # regard.fast installs faster kernels here

    def __init__(
        self, query: nn.Module, table: nn.Module | None, widths: tuple[int, int], scale: Scale, site: Site
    ) -> None:
        super().__init__()
        check_heads(widths[0], site.heads, "a memory", site)
        self.query, self.both = query, table
        self.widths, self.width = list(widths), widths[1]
        self.heads, self.dropout = site.heads, site.attention_dropout
        self.scale = factor(scale, widths[0] // site.heads)

    def ask(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T K"]:
        return split_heads(self.query(h), self.heads)

    def table(self, memory: Float[Tensor, "B S M"]) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S V"]]:
        k, v = (memory, memory) if self.both is None else self.both(memory).split(self.widths, -1)
        return split_heads(k, self.heads), split_heads(v, self.heads)

    def answer(
        self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], v: Float[Tensor, "B H S V"], view: View
    ) -> Float[Tensor, "B H T V"]:
        return self.attend(q, k, v, view, scale=self.scale, dropout=active(self.dropout, self.training))

    def weights(self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], view: View) -> Float[Tensor, "B H T S"]:
        return attention_weights(q, k, view, self.scale)


class AdditiveScoreModule(AttentionScoreModule):
    def __init__(self, spec: AdditiveScore, d_query: int, d_memory: int, site: Site) -> None:
        super().__init__()
        hidden = spec.d_hidden or site.d_model
        check_heads(hidden, site.heads, "its comparison", site)
        check_heads(d_memory, site.heads, "a memory", site)
        self.heads, self.width, self.dropout = site.heads, d_memory, site.attention_dropout
        self.query = site.linear(d_query, {"query": hidden}, bias=False)
        self.key = site.linear(d_memory, {"key": hidden}, bias=False)
        self.score = site.parameter(site.heads, hidden // site.heads, role="other")
        self.length = nn.Parameter(torch.full((site.heads, 1), hidden**-0.5)) if spec.normalised else None
        self.bias = nn.Parameter(torch.zeros(hidden)) if spec.normalised else None

    def ask(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T K"]:
        q = self.query(h)
        return split_heads(q if self.bias is None else q + self.bias.to(q.dtype), self.heads)

    def table(self, memory: Float[Tensor, "B S M"]) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S V"]]:
        return split_heads(self.key(memory), self.heads), split_heads(memory, self.heads)

    def scores(self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"]) -> Float[Tensor, "B H T S"]:
        """v' tanh(q + k) for every pair."""
        v = self.score
        if self.length is not None:
            v = self.length * v / v.norm(dim=1, keepdim=True)
        compared = (q[:, :, :, None] + k[:, :, None]).tanh()  # (B, H, T, S, K)
        return (compared @ v.to(q.dtype)[None, :, None, :, None]).squeeze(-1)

    def answer(
        self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], v: Float[Tensor, "B H S V"], view: View
    ) -> Float[Tensor, "B H T V"]:
        return mix(self.scores(q, k), v, view, dropout=active(self.dropout, self.training))

    def weights(self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], view: View) -> Float[Tensor, "B H T S"]:
        with torch.no_grad():
            return softmax(self.scores(q, k), view)


def look(
    lookup: AttentionScoreModule,
    h: Float[Tensor, "B T D"],
    k: Float[Tensor, "b H S K"],
    v: Float[Tensor, "b H S V"],
    view: View,
    weighed: list[Tensor] | None,
) -> Float[Tensor, "B T C"]:
    """What states find in a table, whose rows the beams of a source may share; `weighed` takes the weights."""
    B, T, _ = h.shape
    beams = B // k.shape[0]
    q = beams_together(lookup.ask(h), beams)
    if weighed is not None:
        weighed.append(beams_apart(lookup.weights(q, k, view), beams, T))
    return merge_heads(beams_apart(lookup.answer(q, k, v, view), beams, T))
