"""Attention scores (dot, bilinear, general, additive) of recurrent decoders."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.attention import active, attend, merge_heads, mix, softmax, split_heads
from regard.nn.attention_heads import Scale, attention_weights, beams_apart, beams_together, factor
from regard.nn.checks import check_count
from regard.nn.core import Site
from regard.nn.mask import View
from regard.tree import Spec


class AttentionScore(Spec):
    """Base class of attention scores, which compare decoder states with a memory (encoder outputs) in `heads` heads."""

    __slots__ = ()

    @abstractmethod
    def build(self, d_query: int, d_memory: int, site: Site) -> "AttentionScoreModule":
        """Build an attention module for queries of width `d_query` and a memory of width `d_memory`."""


@dataclass(frozen=True, slots=True)
class DotScore(AttentionScore):
    """Dot score h' m_j of Luong et al. 2015, with decoder state h and memory m_j, both split into heads."""

    kind = "dot"
    scale: Scale = "none"

    def build(self, d_query: int, d_memory: int, site: Site) -> "AttentionScoreModule":
        unequal = f"a state of width {d_query} has no dot product with a memory of {d_memory} channels; use 'bilinear'"
        site.require(d_query == d_memory, "kind", unequal)
        return ProductScoreModule(nn.Identity(), None, (d_memory, d_memory), self.scale, site)


@dataclass(frozen=True, slots=True)
class BilinearScore(AttentionScore):
    """General score h' W m_j of Luong et al. 2015, with decoder state h and memory m_j, split into heads."""

    kind = "bilinear"
    scale: Scale = "none"
    bias: bool | None = False

    def build(self, d_query: int, d_memory: int, site: Site) -> "AttentionScoreModule":
        query = site.linear(d_query, {"query": d_memory}, bias=self.bias)
        return ProductScoreModule(query, None, (d_memory, d_memory), self.scale, site)


@dataclass(frozen=True, slots=True)
class GeneralScore(AttentionScore):
    """Attention with learned projections, as in CS 182: sum_j softmax_j(scale * q' k_j) v_j.

    For decoder state h and memory m_j, q = W_q h is the query, k_j = W_k m_j are the keys, and v_j = W_v m_j are the
    values.
    """

    kind = "general"
    scale: Scale = "sqrt"
    bias: bool | None = None  # None: as in the model's `linear`

    def build(self, d_query: int, d_memory: int, site: Site) -> "AttentionScoreModule":
        width = site.heads * site.d_head
        query = site.linear(d_query, {"query": width}, bias=self.bias)
        table = site.linear(d_memory, {"key": width, "value": width}, bias=self.bias)
        return ProductScoreModule(query, table, (width, width), self.scale, site)


@dataclass(frozen=True, slots=True)
class AdditiveScore(AttentionScore):
    """Additive score v' tanh(W_q h + W_k m_j) of Bahdanau et al. 2015, with decoder state h and memory m_j.

    The memory is split into heads. With `normalised`, v is replaced by g * v / |v| with a learned g, and a bias is
    added inside tanh (Salimans and Kingma 2016, as in GNMT).
    """

    kind = "additive"
    d_hidden: int | None = None  # width of W_q h; None: d_model
    normalised: bool = False

    def check(self) -> None:
        check_count("d_hidden", self.d_hidden)

    def build(self, d_query: int, d_memory: int, site: Site) -> "AttentionScoreModule":
        return AdditiveScoreModule(self, d_query, d_memory, site)


class AttentionScoreModule(nn.Module):
    """Abstract base class of attention modules, which compute queries, keys, values and context vectors."""

    width: int  # width of a context vector
    heads: int
    dropout: float

    @abstractmethod
    def queries(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T K"]:
        """Return the queries for the decoder states `h`."""

    @abstractmethod
    def keys_and_values(
        self, memory: Float[Tensor, "B S M"]
    ) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S V"]]:
        """Return keys and values for a memory (encoder outputs)."""

    @abstractmethod
    def context(
        self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], v: Float[Tensor, "B H S V"], view: View
    ) -> Float[Tensor, "B H T V"]:
        """Return the context vectors: the averages of the values, weighted by attention."""

    @abstractmethod
    def weights(self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], view: View) -> Float[Tensor, "B H T S"]:
        """Return the attention weights, which a trace records."""


def check_heads(width: int, heads: int, what: str, site: Site) -> None:
    """Raise an error if the number of heads does not divide `width`. `what` describes the width in the message."""
    problem = f"{heads} heads do not divide the {width} channels of {what}"
    site.require(width % heads == 0, "kind", f"{problem}; choose a divisor")


class ProductScoreModule(AttentionScoreModule):
    """Attention whose scores are dot products of queries and keys."""

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

    def queries(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T K"]:
        return split_heads(self.query(h), self.heads)

    def keys_and_values(
        self, memory: Float[Tensor, "B S M"]
    ) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S V"]]:
        k, v = (memory, memory) if self.both is None else self.both(memory).split(self.widths, -1)
        return split_heads(k, self.heads), split_heads(v, self.heads)

    def context(
        self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], v: Float[Tensor, "B H S V"], view: View
    ) -> Float[Tensor, "B H T V"]:
        return self.attend(q, k, v, view, scale=self.scale, dropout=active(self.dropout, self.training))

    def weights(self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], view: View) -> Float[Tensor, "B H T S"]:
        return attention_weights(q, k, view, self.scale)


class AdditiveScoreModule(AttentionScoreModule):
    def __init__(self, spec: AdditiveScore, d_query: int, d_memory: int, site: Site) -> None:
        super().__init__()
        hidden = spec.d_hidden or site.d_model
        check_heads(hidden, site.heads, "d_hidden", site)
        check_heads(d_memory, site.heads, "a memory", site)
        self.heads, self.width, self.dropout = site.heads, d_memory, site.attention_dropout
        self.query = site.linear(d_query, {"query": hidden}, bias=False)
        self.key = site.linear(d_memory, {"key": hidden}, bias=False)
        self.score = site.parameter(site.heads, hidden // site.heads, role="other")
        self.length = nn.Parameter(torch.full((site.heads, 1), hidden**-0.5)) if spec.normalised else None
        self.bias = nn.Parameter(torch.zeros(hidden)) if spec.normalised else None

    def queries(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T K"]:
        q = self.query(h)
        return split_heads(q if self.bias is None else q + self.bias.to(q.dtype), self.heads)

    def keys_and_values(
        self, memory: Float[Tensor, "B S M"]
    ) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S V"]]:
        return split_heads(self.key(memory), self.heads), split_heads(memory, self.heads)

    def scores(self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"]) -> Float[Tensor, "B H T S"]:
        """Return v' tanh(q + k) for every pair of a query q and a key k."""
        v = self.score
        if self.length is not None:
            v = self.length * v / v.norm(dim=1, keepdim=True)
        hidden = (q[:, :, :, None] + k[:, :, None]).tanh()  # (B, H, T, S, K)
        return (hidden @ v.to(q.dtype)[None, :, None, :, None]).squeeze(-1)

    def context(
        self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], v: Float[Tensor, "B H S V"], view: View
    ) -> Float[Tensor, "B H T V"]:
        return mix(self.scores(q, k), v, view, dropout=active(self.dropout, self.training))

    def weights(self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], view: View) -> Float[Tensor, "B H T S"]:
        with torch.no_grad():
            return softmax(self.scores(q, k), view)


def attend_to(
    score: AttentionScoreModule,
    h: Float[Tensor, "B T D"],
    k: Float[Tensor, "b H S K"],
    v: Float[Tensor, "b H S V"],
    view: View,
    weights: list[Tensor] | None,
) -> Float[Tensor, "B T C"]:
    """Return the context vectors for the decoder states `h`. The beams of a source share keys and values.

    If `weights` is a list, the attention weights are appended to it.
    """
    B, T, _ = h.shape
    beams = B // k.shape[0]
    q = beams_together(score.queries(h), beams)
    if weights is not None:
        weights.append(beams_apart(score.weights(q, k, view), beams, T))
    return merge_heads(beams_apart(score.context(q, k, v, view), beams, T))
