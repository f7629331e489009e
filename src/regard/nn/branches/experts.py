"""Mixtures of experts: each token is processed by one or two of many feed-forward networks."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.nn.activation import Activation
from regard.nn.branches.base import BranchSpec
from regard.nn.checks import MOST_EXPERTS, check_above, check_count, check_not_negative, check_rate
from regard.nn.core import Branch, Site
from regard.nn.expert_networks import ExpertNetworks, Slots, queue_rank, unlimited
from regard.nn.mask import Context
from regard.nn.precision import full_precision, widen


@dataclass(frozen=True, slots=True)
class MixtureOfExperts(BranchSpec):
    """Mixture of experts of Shazeer et al. 2017, as in Lepikhin et al. 2021: two experts process each token.

    y = g_1 * expert_1(x) + g_2 * expert_2(x) with the two most probable experts of p = softmax(x G), computed in
    float32. Here g_i = p_i / (p_1 + p_2) and expert_e(x) = phi(x U_e) V_e, with the activation phi.

    In training, the second expert is used with probability min(1, g_2 / threshold). The tokens of a batch are divided
    into groups. An expert processes at most max(4, group * capacity / experts) tokens of each group: first choices come
    before second choices, and earlier tokens before later ones. The output of an expert for a token beyond this
    capacity is 0. In training, the output for a token therefore depends on the other tokens of the group, including
    later ones. Evaluation uses both experts and drops no token. Padding is not routed. Capacity and balance loss are
    computed per batch, so gradient accumulation differs from one large batch.
    """

    kind = "mixture_of_experts"
    experts: int = 32
    d_hidden: int | None = None  # None: 2 * d_model, so that two experts cost as much as one feed-forward layer
    activation: Activation = "relu"
    capacity: float = 1.25  # total capacity of all experts, as a multiple of the tokens in a group
    group: int = 1024  # largest number of tokens in a group
    threshold: float = 0.2
    balance: float = 0.01  # weight of the loss experts * sum_e f_e P_e; f: share of first choices, P: mean p

    def check(self) -> None:
        _check(self, 2)
        check_not_negative("threshold", self.threshold)

    def build(self, site: Site) -> Branch:
        return MixtureOfExpertsModule(self, self.d_hidden or 2 * site.d_model, site)


@dataclass(frozen=True, slots=True)
class Switch(BranchSpec):
    """Switch layer of Fedus et al. 2022: y = p_e * expert_e(x) with the most probable expert e.

    The router computes p = softmax(x G) in float32. In training, its input x is multiplied by random numbers from U(1 -
    jitter, 1 + jitter). The tokens of a batch are divided into groups, and an expert processes at most max(4, group *
    capacity / experts) tokens of each group, earlier tokens first. The output for a token beyond this capacity is 0.
    Evaluation drops no token. Padding is not routed. Capacity and balance loss are computed per batch, so gradient
    accumulation differs from one large batch.
    """

    kind = "switch"
    experts: int = 32
    d_hidden: int | None = None  # None: 4 * d_model
    activation: Activation = "relu"
    capacity: float = 1.25  # total capacity of all experts, as a multiple of the tokens in a group
    group: int = 1024  # largest number of tokens in a group
    jitter: float = 0.01
    balance: float = 0.01  # weight of the loss experts * sum_e f_e P_e; f: share of choices, P: mean p

    def check(self) -> None:
        _check(self, 1)
        check_rate("jitter", self.jitter)

    def build(self, site: Site) -> Branch:
        return SwitchModule(self, self.d_hidden or 4 * site.d_model, site)


def _check(spec: MixtureOfExperts | Switch, used: int) -> None:
    check_count("experts", spec.experts, MOST_EXPERTS, used)
    for name in ("d_hidden", "group"):
        check_count(name, getattr(spec, name))
    check_above("capacity", spec.capacity, 0)
    check_not_negative("balance", spec.balance)


class Routing(NamedTuple):
    """The output of the router: K of E experts chosen for each of N tokens, the most probable expert first."""

    expert: Tensor  # (N, K)
    gate: Tensor  # (N, K): weight of the expert's output
    sent: Tensor  # (N, K): False for padding and for unused second choices
    probability: Tensor  # (N, E)


class Experts(ExpertNetworks):
    """Abstract base class of mixtures of experts whose capacity is limited in training."""

    def __init__(self, spec: MixtureOfExperts | Switch, d_hidden: int, site: Site) -> None:
        super().__init__()
        self.router = site.parameter(spec.experts, site.d_model, role="router")
        self.build_experts(spec.experts, d_hidden, spec.activation, site)
        self.capacity, self.group, self.balance = spec.capacity, spec.group, spec.balance
        # Counts for the log, not stored in checkpoints.
        self.dropped: Tensor
        self.routed: Tensor
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("routed", torch.zeros((), dtype=torch.int64), persistent=False)

    @abstractmethod
    def choose(self, x: Float[Tensor, "N D"], real: Bool[Tensor, " N"]) -> Routing:
        """Choose the experts of each token and their gates (weights of their outputs). `real` is False for padding."""

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:  # noqa: ARG002
        tokens, seg = x.flatten(0, 1), ctx.own.mask.q_seg
        real = torch.ones_like(tokens[:, 0], dtype=torch.bool) if seg is None else (seg != 0).flatten()
        choice = self.choose(tokens, real)
        if self.training:
            places = _limited(choice, self.capacity, self.group)
            self._count(choice, places)
        else:
            places = unlimited(choice.expert, choice.sent, choice.probability.shape[1])
        if ctx.losses is not None:
            ctx.losses.append(self.balance * _imbalance(choice, real, self.group))
        if ctx.trace is not None:
            gate = choice.gate.masked_fill(~choice.sent, 0.0)
            self.trace_route(ctx.trace, x, choice.expert, gate)
        outputs = self.run(tokens, places)
        return (outputs * choice.gate[..., None].to(outputs.dtype)).sum(1).view_as(x)

    def probabilities(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        """Return softmax(x G) in float32, even under autocast, because rounding would change the choice of experts."""
        with full_precision(x.device):
            return (widen(x) @ widen(self.router).T).softmax(-1)

    def report(self) -> dict[str, Tensor]:
        """Return the numbers of (token, expert) pairs dropped and routed since the last report, and reset them."""
        counts = {"dropped_tokens": self.dropped.clone(), "routed_tokens": self.routed.clone()}
        self.dropped.zero_()
        self.routed.zero_()
        return counts

    def _count(self, choice: Routing, places: Slots) -> None:
        routed = (places.at < places.rows * places.width).sum()
        self.routed += routed
        self.dropped += choice.sent.sum() - routed


class MixtureOfExpertsModule(Experts):
    used = 2

    def __init__(self, spec: MixtureOfExperts, d_hidden: int, site: Site) -> None:
        super().__init__(spec, d_hidden, site)
        self.threshold = spec.threshold

    def choose(self, x: Float[Tensor, "N D"], real: Bool[Tensor, " N"]) -> Routing:
        probability = self.probabilities(x)
        best, expert = probability.topk(self.used, -1)
        gate = best / (best.sum(-1, keepdim=True) + 1e-9)
        second = real
        # Narang et al. sample the second expert in evaluation too, so that their output is not a function of the input.
        if self.training:
            second = real & (torch.rand_like(gate[:, 1]) * self.threshold < gate[:, 1])
        return Routing(expert, gate, torch.stack((real, second), 1), probability)


class SwitchModule(Experts):
    used = 1

    def __init__(self, spec: Switch, d_hidden: int, site: Site) -> None:
        super().__init__(spec, d_hidden, site)
        self.jitter = spec.jitter

    def choose(self, x: Float[Tensor, "N D"], real: Bool[Tensor, " N"]) -> Routing:
        if self.training and self.jitter > 0.0:
            x = widen(x)
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        probability = self.probabilities(x)
        gate, expert = probability.max(-1, keepdim=True)
        return Routing(expert, gate, real[:, None], probability)


def _groups(tokens: int, most: int) -> tuple[int, int]:
    """Divide tokens into as few groups of at most `most` as possible. Return the number of groups and their size."""
    groups = -(-tokens // most)
    return groups, -(-tokens // groups)


def _grouped(x: Tensor, groups: int, size: int) -> Tensor:
    """Reshape x from (N, ...) to (groups, size, ...), padded with zeros."""
    missing = groups * size - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)).unflatten(0, (groups, size))


def _limited(choice: Routing, capacity: float, most: int) -> Slots:
    """Place the (token, expert) pairs within the capacity of each expert and group, and drop the other pairs."""
    (N, K), E = choice.expert.shape, choice.probability.shape[1]
    G, S = _groups(N, most)
    C = min(S, max(4, int(S * capacity / E)))
    chosen = F.one_hot(choice.expert, E) * choice.sent[..., None]
    # All first choices of a group come before all second choices.
    queue = _grouped(chosen, G, S).transpose(1, 2).flatten(1, 2)
    rank = queue_rank(queue, 1).unflatten(1, (K, S)).transpose(1, 2).flatten(0, 1)[:N]
    group = torch.arange(N, device=rank.device)[:, None] // S
    at = (choice.expert * G + group) * C + rank
    return Slots(at.where(choice.sent & (rank < C), E * G * C), G * C, E, None)


def _imbalance(choice: Routing, real: Bool[Tensor, " N"], most: int) -> Float[Tensor, ""]:
    """Return the balance loss E * sum_e f_e * P_e, averaged over groups. If experts are used equally, it is 1.

    f_e is the fraction of real tokens whose first choice is expert e, and P_e is the mean probability of expert e.
    """
    E = choice.probability.shape[1]
    G, S = _groups(real.shape[0], most)
    mask = _grouped(real[:, None].to(choice.probability.dtype), G, S)
    tokens = mask.sum(1).clamp(min=1.0)
    share = (_grouped(F.one_hot(choice.expert[:, 0], E), G, S) * mask).sum(1) / tokens
    mean = (_grouped(choice.probability, G, S) * mask).sum(1) / tokens
    return E * (share * mean).sum() / mask.any(1).sum().clamp(min=1)
