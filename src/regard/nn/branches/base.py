"""The branch slot: the specs for the residual branches of a block."""

from abc import abstractmethod
from typing import ClassVar

from regard.nn.core import Branch, Site
from regard.tree import Spec


class BranchSpec(Spec):
    """The branch slot: the specs that build a residual branch."""

    __slots__ = ()
    attends: ClassVar[bool] = False  # whether the stack's position scheme and attention pattern apply to it
    packs: ClassVar[bool] = True  # whether it keeps the segments of packed rows apart
    ordered: ClassVar[bool] = False  # whether token order matters without a position scheme, as in a convolution

    @abstractmethod
    def build(self, site: Site) -> Branch:
        """Return the branch, built at `site`."""
