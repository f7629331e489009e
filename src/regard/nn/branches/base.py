"""Branch slot: the residual branches of a block."""

from abc import abstractmethod
from typing import ClassVar

from regard.nn.core import Branch, Site
from regard.tree import Spec


class BranchSpec(Spec):
    """Slot: describes a branch."""

    __slots__ = ()
    attends: ClassVar[bool] = False  # self-attention: the stack's position and attention pattern apply to it
    packs: ClassVar[bool] = True  # keeps the segments of packed rows apart
    ordered: ClassVar[bool] = False  # depends on the order of tokens without a position: convolution, recurrence

    @abstractmethod
    def build(self, site: Site) -> Branch:
        """Build the branch at this site."""
