"""Norm slot: what keeps the scale of a vector."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.precision import widen
from regard.tree import Spec


class Norm(Spec):
    """Slot: normalises the last axis."""

    __slots__ = ()

    @abstractmethod
    def build(self, site: Site, width: int | None = None) -> nn.Module:
        """The module over vectors of `width` (None: the stream's)."""


@dataclass(frozen=True, slots=True)
class LayerNorm(Norm):
    """Ba et al. 2016: (x - mean) / sqrt(var + eps) * g + b, with the population variance.

    The lectures print four forms. This covers three: `gain="scalar"` is USC 467's, `eps=0` is COMP7607's, and
    `gain="none", root="outside"`, (x - mean) / (sqrt(var) + eps), is CS 224n's. The fourth, CS 182's, is RMSNorm.
    """

    kind = "layer_norm"
    gain: Literal["vector", "scalar", "none"] = "vector"
    bias: bool = True  # of the gain's shape; without gain there is none
    eps: float = 1e-5
    root: Literal["inside", "outside"] = "inside"  # where eps stands

    def check(self) -> None:
        _check_eps(self.eps)

    def build(self, site: Site, width: int | None = None) -> nn.Module:
        width = width or site.d_model
        shape = {"vector": (width,), "scalar": (1,), "none": None}[self.gain]
        if self.root == "inside" and self.gain != "scalar":
            return nn.LayerNorm(width, self.eps, elementwise_affine=shape is not None, bias=self.bias)
        return LayerNormModule(shape, self.bias, self.eps, self.root == "outside")


class LayerNormModule(nn.Module):
    def __init__(self, shape: tuple[int] | None, bias: bool, eps: float, outside: bool) -> None:
        super().__init__()
        self.weight = None if shape is None else nn.Parameter(torch.ones(shape))
        self.bias = None if shape is None or not bias else nn.Parameter(torch.zeros(shape))
        self.eps, self.outside = eps, outside

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        wide = widen(x)
        centred = wide - wide.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        root = variance.sqrt() + self.eps if self.outside else (variance + self.eps).sqrt()
        y = (centred / root).type_as(x)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class RMSNorm(Norm):
    """Zhang & Sennrich 2019: x / sqrt(mean(x^2) + eps) * g. No centring, no bias."""

    kind = "rms_norm"
    eps: float = 1e-6

    def check(self) -> None:
        _check_eps(self.eps)

    def build(self, site: Site, width: int | None = None) -> nn.Module:
        return nn.RMSNorm(width or site.d_model, self.eps)


@dataclass(frozen=True, slots=True)
class PartialRMSNorm(Norm):
    """Zhang & Sennrich 2019, pRMSNorm: the mean square runs over the first ceil(fraction * D) channels only.

    The row "RMS Norm" of Narang et al. 2021 was run like this, with 6.75 %.
    """

    kind = "partial_rms_norm"
    fraction: float = 0.0675
    eps: float = 1e-6

    def check(self) -> None:
        _check_eps(self.eps)
        if not 0.0 < self.fraction <= 1.0:
            raise SpecError("fraction", f"must be above 0 and at most 1, not {self.fraction}")

    def build(self, site: Site, width: int | None = None) -> nn.Module:
        return PartialRMSNormModule(width or site.d_model, self.fraction, self.eps)


class PartialRMSNormModule(nn.Module):
    def __init__(self, width: int, fraction: float, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.seen, self.eps = math.ceil(fraction * width), eps

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        wide = widen(x)
        square = wide[..., : self.seen].square().mean(-1, keepdim=True)
        return (wide * torch.rsqrt(square + self.eps)).type_as(x) * self.weight


@dataclass(frozen=True, slots=True)
class ScaleNorm(Norm):
    """Nguyen & Salazar 2019: g * x / max(|x|, eps), one learned scalar g that starts at sqrt(D)."""

    kind = "scale_norm"
    eps: float = 1e-5

    def check(self) -> None:
        _check_eps(self.eps)

    def build(self, site: Site, width: int | None = None) -> nn.Module:
        return ScaleNormModule(width or site.d_model, self.eps)


class ScaleNormModule(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), math.sqrt(width)))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        return self.weight * F.normalize(x, dim=-1, eps=self.eps)


@dataclass(frozen=True, slots=True)
class NoNorm(Norm):
    """x, unchanged."""

    kind = "no_norm"

    def build(self, site: Site, width: int | None = None) -> nn.Module:  # noqa: ARG002
        return nn.Identity()


def _check_eps(eps: float) -> None:
    if eps < 0.0:
        raise SpecError("eps", f"must not be negative, not {eps}")
