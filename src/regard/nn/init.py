"""Weight initialisation: specs that initialise each weight according to its role (query, embedding, ...)."""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.nn.checks import check_not_negative
from regard.nn.core import Role, Site
from regard.tree import Spec


class Init(Spec):
    """Abstract base class of specs that initialise weights."""

    __slots__ = ()

    @abstractmethod
    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        """Initialise `weight` in place: a projection (out, in), or an embedding table (number of vectors, width)."""


@dataclass(frozen=True, slots=True)
class Xavier(Init):
    """Glorot uniform for projections, as in the first Transformer code, and N(0, 1 / width) for embedding tables."""

    kind = "xavier"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:  # noqa: ARG002
        with torch.no_grad():
            if role in ("embedding", "position"):
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
            else:
                _glorot(weight, 1.0)


@dataclass(frozen=True, slots=True)
class Normal(Init):
    """N(0, std^2) for all weights, as in BERT."""

    kind = "normal"
    std: float = 0.02

    def check(self) -> None:
        check_not_negative("std", self.std)

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:  # noqa: ARG002
        with torch.no_grad():
            weight.normal_(0.0, self.std)


@dataclass(frozen=True, slots=True)
class GPT2Init(Init):
    """Radford et al. 2019: N(0, std^2), with a smaller std for the last projection of a branch and for positions.

    The last projection of a branch has std / sqrt(2 * depth), so that the variance of the sum over the 2 * depth
    branches of a stack does not grow with depth. Position embeddings have std / 2.
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
    """Raffel et al. 2020: normal weights. W_q includes the factor 1/sqrt(d_head), which T5's attention omits.

    The standard deviations are (d_model * d_head)^-1/2 for queries, d_in^-1/2 for other projections with d_in inputs, 1
    for embedding tables and d_model^-1/2 for relative biases.
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
    """`T5Init` for attention that divides scores by sqrt(d_head).

    The standard deviations are d_in^-1/2 for projections with d_in inputs, 1 for embedding tables and d_model^-1/2 for
    relative biases.
    """

    kind = "fan_in"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        std = {"embedding": 1.0, "position": site.d_model**-0.5}.get(role, weight.shape[-1] ** -0.5)
        with torch.no_grad():
            weight.normal_(0.0, std)


@dataclass(frozen=True, slots=True)
class DeepNormInit(Init):
    """Wang et al. 2022: Glorot normal, with gain beta for value, output and feed-forward projections.

    In a single stack of N blocks, beta = (8 * N)^-1/4. With N encoder and M decoder blocks, beta is 0.87 * (N^4 *
    M)^-1/16 in the encoder and (12 * M)^-1/4 in the decoder. To be used with the residual rule `DeepNorm`.
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
    """Gehring et al. 2017, 3.5: weights that preserve the variance of activations through gates and dropout.

    The weights of a projection with n inputs and dropout rate p are from N(0, (1 - p) / n). Before a gated linear unit,
    they are from N(0, 4 * (1 - p) / n), because the gate leaves a quarter of the variance. Embedding tables are from
    N(0, 0.1^2).
    """

    kind = "convs2s_init"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        gain = 4.0 if role in ("up", "gate") else 1.0
        std = 0.1 if role in ("embedding", "position") else math.sqrt(gain * (1 - site.dropout) / weight.shape[-1])
        with torch.no_grad():
            weight.normal_(0.0, std)


@dataclass(frozen=True, slots=True)
class Uniform(Init):
    """U(-bound, bound) for all weights, as in the recurrent models of Sutskever et al. 2014 and Wu et al. 2016."""

    kind = "uniform"
    bound: float = 0.1

    def check(self) -> None:
        check_not_negative("bound", self.bound)

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:  # noqa: ARG002
        with torch.no_grad():
            weight.uniform_(-self.bound, self.bound)


@dataclass(frozen=True, slots=True)
class Uninitialized(Init):
    """No initialisation, for a model whose weights are loaded right after it is built."""

    kind = "uninitialized"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        pass


def _glorot(weight: Tensor, gain: float) -> None:
    bound = gain * math.sqrt(6.0 / (weight.shape[0] + weight.shape[-1]))
    weight.uniform_(-bound, bound)
