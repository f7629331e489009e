"""Bridge slot: what the decoder sees of the encoder."""

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
    """Slot: from what the encoder left to what the decoder sees."""

    __slots__ = ()
    needs_layers: ClassVar[bool] = False  # whether the encoder must keep the stream between its blocks

    @abstractmethod
    def build(self, layers: int, calls: int, site: Site) -> nn.Module:
        """A module from StackOut to Memory; `layers` streams are kept by the encoder, `calls` read by the decoder."""


@dataclass(frozen=True, slots=True)
class Last(Bridge):
    """The encoder's last layer, for every decoder block."""

    kind = "last"

    def build(self, layers: int, calls: int, site: Site) -> nn.Module:  # noqa: ARG002
        return LastModule()


class LastModule(nn.Module):
    def forward(self, out: StackOut) -> Memory:
        return Memory((out.x,), out.seg)


@dataclass(frozen=True, slots=True)
class Transparent(Bridge):
    """Bapna et al. 2018: decoder block j looks at z_j = sum_i softmax_i(W_ij) h_i, a learned mixture of all layers.

    h_0 is what the encoder read, h_N what it left (after a final norm, where there is one), and between them stands
    the stream as it is. Dropout is on W.
    """

    kind = "transparent"
    needs_layers = True

    def build(self, layers: int, calls: int, site: Site) -> nn.Module:
        return TransparentModule(NoNorm(), layers, calls, site)


@dataclass(frozen=True, slots=True)
class TransparentNormed(Bridge):
    """As `transparent`, with a norm before the mixture for every layer: the stream of a pre-norm encoder grows."""

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
        """What the layers of the encoder left."""
        if len(out.layers) != len(self.norms) or any(layer.shape != out.x.shape for layer in out.layers):
            raise self.site.error("kind", "this encoder does not keep a stream of one length; use 'last'")
        return torch.stack([norm(layer) for norm, layer in zip(self.norms, out.layers, strict=True)])
