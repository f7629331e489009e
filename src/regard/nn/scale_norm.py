"""ScaleNorm: vectors scaled to one learned length."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.checks import check_not_negative
from regard.nn.core import Site
from regard.nn.norm import Norm


@dataclass(frozen=True, slots=True)
class ScaleNorm(Norm):
    """Nguyen & Salazar 2019: g * x / max(|x|, eps), with a learned scalar g, initially sqrt(D) for D channels."""

    kind = "scale_norm"
    eps: float = 1e-5

    def check(self) -> None:
        check_not_negative("eps", self.eps)

    def build(self, site: Site, width: int | None = None) -> nn.Module:
        return ScaleNormModule(width or site.d_model, self.eps)


class ScaleNormModule(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), math.sqrt(width)))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        return self.weight * F.normalize(x, dim=-1, eps=self.eps)
