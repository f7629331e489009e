"""The Weighted Transformer: every head goes through a feed-forward and has a weight."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.branches.base import BranchSpec
from regard.nn.checks import require
from regard.nn.core import Branch, Site
from regard.nn.heads import Heads, attention_site
from regard.nn.mask import Context
from regard.nn.state import Rows, State


@runtime_checkable
class Unprojected(Heads, Protocol):
    """An attention that can leave its heads side by side."""

    @property
    def output(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Weighted(BranchSpec):
    """sum_i alpha_i FFN(kappa_i head_i W_i): attention and feed-forward in one branch.

    Ahmed et al. 2017 as Narang et al. 2021 ran it: the heads share the feed-forward, kappa and alpha are free numbers
    that start in U(0, 1). `attention` gives the heads and has no output projection of its own.
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
    """sum_i alpha_i FFN_i(kappa_i head_i W_i) with kappa, alpha >= 0 and sum 1: the paper's own (Ahmed et al. 2017).

    Each head has a feed-forward of this description; the paper divides the usual hidden width among them. A softmax
    keeps kappa and alpha where they belong; they start equal.
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
    require(not spec.attention.output, "attention.output", "each head is projected on its own here; set it to false")
    require(
        spec.feedforward.kind == "feedforward", "feedforward", f"needs a feedforward, not {spec.feedforward.kind!r}"
    )  # the heads pass as more rows, which only a map of single tokens allows


class WeightedHeads(Branch):
    """Abstract: the heads of an attention, each projected to the stream. Its state is the attention's."""

    def __init__(self, spec: Weighted | WeightedSimplex, site: Site) -> None:
        super().__init__()
        assert isinstance(spec.attention, Heads)
        inner, _ = attention_site(spec.attention, site.inside("attention"))
        self.heads = inner.heads
        self.attention = spec.attention.build(site.inside("attention", held=True))
        # No branch ends with it, so it is drawn as what stands before an end: Fixup would else begin with two zeros.
        self.output = site.parameter(site.d_model, inner.heads * inner.d_value, role="value")

    @abstractmethod
    def weights(self) -> tuple[Float[Tensor, " H"], Float[Tensor, " H"]]:
        """kappa and alpha."""

    @abstractmethod
    def transform(self, branches: Float[Tensor, "B H T D"], ctx: Context) -> Float[Tensor, "B H T D"]:
        """The feed-forward of every branch."""

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
