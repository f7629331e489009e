"""Bridges: modules that compute the memory, to which the decoder attends, from the outputs of the encoder layers."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.core import Site
from regard.nn.memory import Memory
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.precision import widen
from regard.nn.stacks.base import StackOut
from regard.tree import Spec


class Bridge(Spec):
    """Abstract base class of bridge specs. A bridge computes the memory, to which the decoder attends."""

    __slots__ = ()
    needs_layers: ClassVar[bool] = False  # whether the encoder must return the hidden states between its blocks

    @abstractmethod
    def build(self, layers: int, calls: int, site: Site) -> nn.Module:
        """Build a module that maps the encoder output (`StackOut`) to the memory of the decoder (`Memory`).

        `layers` is the number of encoder layers whose outputs are available. `calls` is the number of decoder blocks.
        """


@dataclass(frozen=True, slots=True)
class Last(Bridge):
    """Every decoder block attends to the output of the last encoder layer."""

    kind = "last"

    def build(self, layers: int, calls: int, site: Site) -> nn.Module:  # noqa: ARG002
        return LastModule()


class LastModule(nn.Module):
    def forward(self, out: StackOut) -> Memory:
        return Memory((out.x,), out.seg)


@dataclass(frozen=True, slots=True)
class Transparent(Bridge):
    """Bapna et al. 2018: decoder block j attends to z_j = sum_i softmax_i(W_ij) * h_i, a mixture of all layers.

    h_0 is the input of the first encoder block, and h_i is the output of block i. If the encoder ends with a norm, the
    last h_i is the output of this norm. Dropout applies to W.
    """

    kind = "transparent"
    needs_layers = True

    def build(self, layers: int, calls: int, site: Site) -> nn.Module:
        return TransparentModule(NoNorm(), layers, calls, site)


@dataclass(frozen=True, slots=True)
class TransparentNormed(Bridge):
    """`Transparent`, but with each layer normalised before the mixture. Pre-norm hidden states grow with depth."""

    kind = "transparent_normed"
    needs_layers = True
    norm: Norm = LayerNorm()

    def build(self, layers: int, calls: int, site: Site) -> nn.Module:
        return TransparentModule(self.norm, layers, calls, site)


class TransparentModule(nn.Module):
    def __init__(self, norm: Norm, layers: int, calls: int, site: Site) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm.build(site.inside("norm")) for _ in range(layers))
        self.weight = nn.Parameter(torch.randn(layers, calls) * layers**-0.5)
        self.weight.projects = False  # type: ignore[reportAttributeAccessIssue]  # scores, not a projection
        self.dropout, self.site = nn.Dropout(site.dropout), site

    def forward(self, out: StackOut) -> Memory:
        shares = widen(self.dropout(self.weight)).softmax(0)  # (layers, calls)
        kept = self.kept(out)
        return Memory(torch.einsum("lj,lbsd->jbsd", shares.to(kept.dtype), kept).unbind(0), out.seg)

    def kept(self, out: StackOut) -> Float[Tensor, "L B S D"]:
        """Return the hidden states of all encoder layers, each normalised by a norm of its own."""
        if len(out.layers) != len(self.norms) or any(layer.shape != out.x.shape for layer in out.layers):
            raise self.site.error("kind", "the layers of this encoder have different lengths; use the bridge 'last'")
        return torch.stack([norm(layer) for norm, layer in zip(self.norms, out.layers, strict=True)])
