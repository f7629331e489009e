"""Init slot: how a weight of a role is drawn."""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.nn.checks import check_not_negative
from regard.nn.core import Role, Site
from regard.tree import Spec


class Init(Spec):
    """Slot: draws weights."""

    __slots__ = ()

    @abstractmethod
    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        """Fill `weight` (out, in) or a table (rows, width) in place."""


@dataclass(frozen=True, slots=True)
class Xavier(Init):
    """Glorot uniform projections, as the first Transformer code; tables N(0, 1 / width)."""

    kind = "xavier"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:  # noqa: ARG002
        with torch.no_grad():
            if role in ("embedding", "position"):
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
            else:
                _glorot(weight, 1.0)


@dataclass(frozen=True, slots=True)
class Normal(Init):
    """N(0, std^2) for everything, as BERT."""

    kind = "normal"
    std: float = 0.02

    def check(self) -> None:
        check_not_negative("std", self.std)

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:  # noqa: ARG002
        with torch.no_grad():
            weight.normal_(0.0, self.std)


@dataclass(frozen=True, slots=True)
class GPT2Init(Init):
    """N(0, std^2), and std / sqrt(2 * depth) where a branch writes to the stream; positions N(0, std^2 / 4).

    Radford et al. 2019: the sum over 2 * depth residual branches then keeps its variance.
    """

    kind = "gpt2_init"
    std: float = 0.02

    def check(self) -> None:
        check_not_negative("std", self.std)

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        std = self.std
        if role in ("attend_out", "down"):
            std /= math.sqrt(2 * site.depth)
        elif role == "position":
            std /= 2
        with torch.no_grad():
            weight.normal_(0.0, std)


@dataclass(frozen=True, slots=True)
class T5Init(Init):
    """Raffel et al. 2020: fan-in normal; the missing 1/sqrt(d_head) of attention is folded into the queries.

    query (d * d_head)^-1/2, other projections d_in^-1/2, tables 1, relative bias d^-1/2.
    """

    kind = "t5_init"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        std = weight.shape[-1] ** -0.5
        if role == "query":
            std = (weight.shape[-1] * site.d_head) ** -0.5
        elif role == "embedding":
            std = 1.0
        elif role == "position":
            std = site.d_model**-0.5
        with torch.no_grad():
            weight.normal_(0.0, std)


@dataclass(frozen=True, slots=True)
class FanIn(Init):
    """T5Init for attention that divides by sqrt(d_head) itself: all projections d_in^-1/2.

    Tables as T5Init: 1, relative bias d^-1/2.
    """

    kind = "fan_in"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        std = {"embedding": 1.0, "position": site.d_model**-0.5}.get(role, weight.shape[-1] ** -0.5)
        with torch.no_grad():
            weight.normal_(0.0, std)


@dataclass(frozen=True, slots=True)
class DeepNormInit(Init):
    """Wang et al. 2022: Glorot normal, with gain beta on value, output and feed-forward weights.

    beta = (8 N)^-1/4 in a lone stack of N blocks; in an encoder-decoder of N and M blocks
    0.87 (N^4 M)^-1/16 in the encoder and (12 M)^-1/4 in the decoder. Goes with the residual rule DeepNorm.
    """

    kind = "deep_norm_init"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        with torch.no_grad():
            if role in ("embedding", "position"):
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
                return
            N, M = site.encoder_depth, site.decoder_depth
            if not N or not M:
                beta = (8 * max(N, M)) ** -0.25
            else:
                beta = 0.87 * (N**4 * M) ** (-1 / 16) if site.side == "encoder" else (12 * M) ** -0.25
            gain = beta if role in ("value", "attend_out", "up", "gate", "down") else 1.0
            weight.normal_(0.0, gain * math.sqrt(2.0 / sum(weight.shape)))


@dataclass(frozen=True, slots=True)
class ConvS2SInit(Init):
    """Gehring et al. 2017, 3.5: activations keep their variance through gates and dropout. Tables N(0, 0.1^2).

    Projections N(0, (1 - p) / n) for n inputs that are dropped at rate p; those into a gated linear unit, which leaves
    a quarter of the variance, N(0, 4 (1 - p) / n).
    """

    kind = "convs2s_init"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        gain = 4.0 if role in ("up", "gate") else 1.0
        std = 0.1 if role in ("embedding", "position") else math.sqrt(gain * (1 - site.dropout) / weight.shape[-1])
        with torch.no_grad():
            weight.normal_(0.0, std)


@dataclass(frozen=True, slots=True)
class Uniform(Init):
    """U(-bound, bound) for everything, as recurrent models were drawn: Sutskever et al. 2014, Wu et al. 2016."""

    kind = "uniform"
    bound: float = 0.1

    def check(self) -> None:
        check_not_negative("bound", self.bound)

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:  # noqa: ARG002
        with torch.no_grad():
            weight.uniform_(-self.bound, self.bound)


@dataclass(frozen=True, slots=True)
class Uninitialized(Init):
    """Leaves weights as they are in memory: for a model whose weights are about to be loaded."""

    kind = "undrawn"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        pass


def _glorot(weight: Tensor, gain: float) -> None:
    bound = gain * math.sqrt(6.0 / (weight.shape[0] + weight.shape[-1]))
    weight.uniform_(-bound, bound)
