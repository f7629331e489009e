"""The Weighted Transformer (Ahmed et al. 2017): each head has learned weights and a feed-forward network."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.attention_heads import Heads, attention_site
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import Rows, State
from regard.nn.checks import require
from regard.nn.core import Branch, Site
from regard.nn.mask import Context


@runtime_checkable
class Unprojected(Heads, Protocol):
    """Interface of attention specs with a field `output`, which omits the output projection if it is False."""

    @property
    def output(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Weighted(BranchSpec):
    """Attention and feed-forward in one branch, sum_i alpha_i * FFN(kappa_i * head_i W_i), as in Narang et al. 2021.

    W_i projects head i to d_model. The heads share the feed-forward network FFN. The weights kappa_i and alpha_i are
    unconstrained and initialised from U(0, 1). `attention` computes the heads and must not have an output projection.
    """

    kind = "weighted"
    attention: BranchSpec
    feedforward: BranchSpec

    def check(self) -> None:
        _check(self)

    def build(self, site: Site) -> Branch:
        return WeightedModule(self, site)


@dataclass(frozen=True, slots=True)
class WeightedSimplex(BranchSpec):
    """Attention and feed-forward in one branch, sum_i alpha_i * FFN_i(kappa_i * head_i W_i), as in Ahmed et al. 2017.

    W_i projects head i to d_model. Each head has its own feed-forward network FFN_i. The paper divides the usual hidden
    width among the heads. kappa and alpha are softmaxes over the heads, computed from parameters that start at 0.
    """

    kind = "weighted_simplex"
    attention: BranchSpec
    feedforward: BranchSpec

    def check(self) -> None:
        _check(self)

    def build(self, site: Site) -> Branch:
        return WeightedSimplexModule(self, site)


def _check(spec: Weighted | WeightedSimplex) -> None:
    if not isinstance(spec.attention, Unprojected):
        raise SpecError("attention", f"needs a self_attention or a cross_attention, not {spec.attention.kind!r}")
    require(not spec.attention.output, "attention.output", "each head is projected separately here; set it to false")
    require(
        spec.feedforward.kind == "feedforward", "feedforward", f"needs a feedforward, not {spec.feedforward.kind!r}"
    )  # heads are folded into the batch axis, to which the mask of a token-mixing branch would not fit


class WeightedHeads(Branch):
    """Abstract base class: attention that projects each head to d_model and applies a feed-forward network to it."""

    def __init__(self, spec: Weighted | WeightedSimplex, site: Site) -> None:
        super().__init__()
        assert isinstance(spec.attention, Heads)
        inner, _ = attention_site(spec.attention, site.inside("attention"))
        self.heads = inner.heads
        self.attention = spec.attention.build(site.inside("attention", nested=True))
        # Initialised as a value projection, because Fixup would set an output projection to zero, besides W_down.
        self.output = site.parameter(site.d_model, inner.heads * inner.d_value, role="value")

    @abstractmethod
    def weights(self) -> tuple[Float[Tensor, " H"], Float[Tensor, " H"]]:
        """Return kappa and alpha, each with one weight per head."""

    @abstractmethod
    def transform(self, branches: Float[Tensor, "B H T D"], ctx: Context) -> Float[Tensor, "B H T D"]:
        """Return the output of the feed-forward network for each projected head."""

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        kappa, alpha = self.weights()
        heads = self.attention(x, ctx, state).unflatten(-1, (self.heads, -1)) * kappa[:, None]  # (B, T, H, V)
        branches = torch.einsum("bthv,dhv->bhtd", heads, self.output.unflatten(1, (self.heads, -1)))
        return torch.einsum("bhtd,h->btd", self.transform(branches, ctx), alpha)

    def start(self, rows: Rows, ctx: Context) -> State | tuple[State | None, ...] | None:
        return self.attention.start(rows, ctx)


class WeightedModule(WeightedHeads):
    def __init__(self, spec: Weighted, site: Site) -> None:
        super().__init__(spec, site)
        self.feedforward = spec.feedforward.build(site.inside("feedforward"))
        self.kappa, self.alpha = nn.Parameter(torch.rand(self.heads)), nn.Parameter(torch.rand(self.heads))

    def weights(self) -> tuple[Float[Tensor, " H"], Float[Tensor, " H"]]:
        return self.kappa, self.alpha

    def transform(self, branches: Float[Tensor, "B H T D"], ctx: Context) -> Float[Tensor, "B H T D"]:
        return self.feedforward(branches.flatten(0, 1), ctx).unflatten(0, (-1, self.heads))


class WeightedSimplexModule(WeightedHeads):
    def __init__(self, spec: WeightedSimplex, site: Site) -> None:
        super().__init__(spec, site)
        self.feedforwards = nn.ModuleList(spec.feedforward.build(site.inside("feedforward")) for _ in range(self.heads))
        self.kappa, self.alpha = nn.Parameter(torch.zeros(self.heads)), nn.Parameter(torch.zeros(self.heads))

    def weights(self) -> tuple[Float[Tensor, " H"], Float[Tensor, " H"]]:
        return self.kappa.softmax(0), self.alpha.softmax(0)

    def transform(self, branches: Float[Tensor, "B H T D"], ctx: Context) -> Float[Tensor, "B H T D"]:
        return torch.stack([f(y, ctx) for f, y in zip(self.feedforwards, branches.unbind(1), strict=True)], 1)
