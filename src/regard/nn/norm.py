"""Norms: the base class, layer normalisation, and no norm."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import nn

from regard.nn.checks import check_not_negative
from regard.nn.core import Site
from regard.nn.layer_norm import LayerNormModule
from regard.tree import Spec


class Norm(Spec):
    """Abstract base class of specs for norms, which normalise the last axis."""

    __slots__ = ()

    @abstractmethod
    def build(self, site: Site, width: int | None = None) -> nn.Module:
        """Build the norm for vectors of `width` channels (default: d_model)."""


@dataclass(frozen=True, slots=True)
class LayerNorm(Norm):
    """Ba et al. 2016: (x - mean) / sqrt(var + eps) * g + b, with the population variance.

    Lectures: USC 467 has `gain="scalar"`, COMP7607 `eps=0`, and CS 224n `gain="none", root="outside"`.
    """

    kind = "layer_norm"
    gain: Literal["vector", "scalar", "none"] = "vector"
    bias: bool = True  # same shape as the gain; no bias if there is no gain
    eps: float = 1e-5
    root: Literal["inside", "outside"] = "inside"  # whether eps is inside or outside the square root

    def check(self) -> None:
        check_not_negative("eps", self.eps)

    def build(self, site: Site, width: int | None = None) -> nn.Module:
        width = width or site.d_model
        shape = {"vector": (width,), "scalar": (1,), "none": None}[self.gain]
        if self.root == "inside" and self.gain != "scalar":
            return nn.LayerNorm(width, self.eps, elementwise_affine=shape is not None, bias=self.bias)
        return LayerNormModule(shape, self.bias, self.eps, self.root == "outside")


@dataclass(frozen=True, slots=True)
class NoNorm(Norm):
    """No norm: the output is equal to the input."""

    kind = "no_norm"

    def build(self, site: Site, width: int | None = None) -> nn.Module:  # noqa: ARG002
        return nn.Identity()
