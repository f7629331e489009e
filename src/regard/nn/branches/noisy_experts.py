"""Mixture of experts with a noisy top-k gate: k of many feed-forward networks process each token."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.nn.activation import Activation
from regard.nn.branches.base import BranchSpec
from regard.nn.checks import MOST_EXPERTS, check_count, check_not_negative, require
from regard.nn.core import Branch, Site
from regard.nn.expert_networks import ExpertNetworks, unlimited
from regard.nn.mask import Context
from regard.nn.precision import full_precision, widen

MIN_NOISE = 0.01  # smallest standard deviation of the noise


@dataclass(frozen=True, slots=True)
class NoisyTopKExperts(BranchSpec):
    """Mixture of experts (Shazeer et al. 2017): a noisy gate chooses k experts for each token.

    y = sum of g_e expert_e(x) over the k experts with the highest scores H_e; g is the softmax of these k scores, and
    expert_e(x) = phi(x U_e) V_e with the activation phi. In training, H = x W_g + eps * (softplus(x W_n) + 0.01) with
    eps ~ N(0, 1); in evaluation, H = x W_g. W_g and W_n are initialised to zero, so that all experts are used equally
    at first. H is computed in float32. If scores are equal, the expert with the lower index is chosen first.

    In training, the loss `balance` * (CV(importance)^2 + CV(load)^2) is added, where CV is the coefficient of variation
    over experts. The importance of expert e is the sum of g_e over tokens. The load of expert e is the sum, over
    tokens, of the probability that e would be among the k experts of the token if the noise of e were drawn again.
    Padding is neither routed nor counted. The loss is computed per batch, so with gradient accumulation it differs from
    the loss of one large batch.

    The capacity of an expert is not limited: no token is dropped, and in evaluation the output for a token depends on
    this token alone. `MixtureOfExperts` and `Switch` are later forms with a limited capacity and other losses.
    """

    kind = "noisy_top_k_experts"
    experts: int = 64
    k: int = 2  # number of experts per token
    d_hidden: int | None = None  # None: 4 * d_model / k, so that k experts cost as much as one feed-forward layer
    activation: Activation = "relu"
    balance: float = 0.01  # weight of the loss

    def check(self) -> None:
        check_count("experts", self.experts, MOST_EXPERTS)
        check_count("k", self.k)
        require(self.k <= self.experts, "k", f"{self.k} exceeds the number of experts; choose at most {self.experts}")
        check_count("d_hidden", self.d_hidden)
        check_not_negative("balance", self.balance)

    def build(self, site: Site) -> Branch:
        return NoisyTopKExpertsModule(self, self.d_hidden or max(1, 4 * site.d_model // self.k), site)


class Gating(NamedTuple):
    """The output of the gate: k of E experts for each of N tokens, the highest score first."""

    expert: Tensor  # (N, k)
    gate: Tensor  # (N, k): weight of the expert's output
    load: Tensor | None  # (N, E): probability that an expert is among the k experts of a token; None without noise


class NoisyTopKExpertsModule(ExpertNetworks):
    def __init__(self, spec: NoisyTopKExperts, d_hidden: int, site: Site) -> None:
        super().__init__()
        self.used, self.balance = spec.k, spec.balance
        self.router = nn.Parameter(torch.zeros(spec.experts, site.d_model))  # W_g
        self.noise = nn.Parameter(torch.zeros(spec.experts, site.d_model))  # W_n
        for weight in (self.router, self.noise):
            weight.projects = False  # type: ignore[reportAttributeAccessIssue]  # as other routers, for the optimizer
        self.build_experts(spec.experts, d_hidden, spec.activation, site)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:  # noqa: ARG002
        tokens, seg = x.flatten(0, 1), ctx.own.mask.q_seg
        real = torch.ones_like(tokens[:, 0], dtype=torch.bool) if seg is None else (seg != 0).flatten()
        expert, gate, load = self.choose(tokens)
        if ctx.losses is not None and load is not None:
            importance = torch.zeros_like(load).scatter(1, expert, gate)
            variation = squared_variation(total(importance, real)) + squared_variation(total(load, real))
            ctx.losses.append(self.balance * variation)
        places = unlimited(expert, real[:, None].expand_as(expert), self.router.shape[0])
        if ctx.trace is not None:
            self.trace_route(ctx.trace, x, expert, gate.masked_fill(~real[:, None], 0.0))
        outputs = self.run(tokens, places)
        return (outputs * gate[..., None].to(outputs.dtype)).sum(1).view_as(x)

    def choose(self, x: Float[Tensor, "N D"]) -> Gating:
        """Choose the k experts with the highest scores for each token. In training, the scores contain noise."""
        k, E = self.used, self.router.shape[0]
        with full_precision(x.device):  # rounding would change the choice of experts
            clean = widen(x) @ widen(self.router).T
            deviation = F.softplus(widen(x) @ widen(self.noise).T) + MIN_NOISE if self.training else None
            scores = clean if deviation is None else clean + torch.randn_like(clean) * deviation
            best, order = scores.sort(dim=-1, descending=True, stable=True)
            expert, gate = order[:, :k], best[:, :k].softmax(-1)
            if deviation is None:
                return Gating(expert, gate, None)
            if k == E:
                return Gating(expert, gate, torch.ones_like(clean))
            return Gating(expert, gate, chance(clean, deviation, best, expert))


def chance(
    clean: Float[Tensor, "N E"], deviation: Float[Tensor, "N E"], best: Float[Tensor, "N E"], expert: Int[Tensor, "N k"]
) -> Float[Tensor, "N E"]:
    """Return the probability that each expert is among the k experts of a token if the noise of its score is redrawn.

    The new score must exceed the k-th highest score of the other experts, whose noise stays the same. If the expert is
    now among the k, this threshold is the (k + 1)-th highest of all scores, otherwise the k-th highest. `best` are the
    scores of a token in descending order.
    """
    k = expert.shape[1]
    inside = torch.zeros_like(clean, dtype=torch.bool).scatter(1, expert, True)
    threshold = torch.where(inside, best[:, k, None], best[:, k - 1, None])
    return torch.special.ndtr((clean - threshold) / deviation)


def total(x: Float[Tensor, "N E"], real: Bool[Tensor, " N"]) -> Float[Tensor, " E"]:
    """Return the sum over the tokens that are not padding (`real` is True)."""
    return x.masked_fill(~real[:, None], 0.0).sum(0)


def squared_variation(x: Float[Tensor, " E"]) -> Float[Tensor, ""]:
    """Return the squared coefficient of variation: variance / mean^2. It is 0 if all values are 0."""
    return x.var(correction=0) / (x.mean().square() + 1e-10)
