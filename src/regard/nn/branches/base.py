"""Branch slot."""

from abc import abstractmethod
from typing import ClassVar

from regard.nn.core import Branch, Site
from regard.tree import Spec


class BranchSpec(Spec):
    """Slot: describes a branch."""

    __slots__ = ()
    attends: ClassVar[bool] = False  # by scores to other tokens of x: a stack's position and pattern apply to it
    packs: ClassVar[bool] = True  # works on packed rows without mixing their segments
    ordered: ClassVar[bool] = False  # depends on the order of tokens by itself: convolution, recurrence

    @abstractmethod
    def build(self, site: Site) -> Branch:
        """The branch at this site."""
