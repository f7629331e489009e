"""Bridge slot: what the decoder sees of the encoder."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from regard.nn.core import Memory, Site
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
        return _Last()


class _Last(nn.Module):
    def forward(self, out: StackOut) -> Memory:
        return Memory((out.x,), out.seg)
