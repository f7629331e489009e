"""RMS normalisation, by the mean square of all channels or of some of them."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.checks import check_not_negative, require
from regard.nn.core import Site
from regard.nn.norm import Norm
from regard.nn.precision import widen


@dataclass(frozen=True, slots=True)
class RMSNorm(Norm):
    """Zhang & Sennrich 2019: x / sqrt(mean(x^2) + eps) * g. No centring, no bias."""

    kind = "rms_norm"
    eps: float = 1e-6

    def check(self) -> None:
        check_not_negative("eps", self.eps)

    def build(self, site: Site, width: int | None = None) -> nn.Module:
        return nn.RMSNorm(width or site.d_model, self.eps)


@dataclass(frozen=True, slots=True)
class PartialRMSNorm(Norm):
    """Zhang & Sennrich 2019, pRMSNorm: RMSNorm with the mean square of the first ceil(fraction * D) of D channels.

    The row "RMS Norm" in the table of Narang et al. 2021 is this norm, with 6.75 % of the channels.
    """

    kind = "partial_rms_norm"
    fraction: float = 0.0675
    eps: float = 1e-6

    def check(self) -> None:
        check_not_negative("eps", self.eps)
        require(0.0 < self.fraction <= 1.0, "fraction", f"must be above 0 and at most 1, not {self.fraction}")

    def build(self, site: Site, width: int | None = None) -> nn.Module:
        return PartialRMSNormModule(width or site.d_model, self.fraction, self.eps)


class PartialRMSNormModule(nn.Module):
    def __init__(self, width: int, fraction: float, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.channels, self.eps = math.ceil(fraction * width), eps

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        wide = widen(x)
        square = wide[..., : self.channels].square().mean(-1, keepdim=True)
        return (wide * torch.rsqrt(square + self.eps)).type_as(x) * self.weight
