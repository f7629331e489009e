"""Base class of branches: the sublayers of a block, such as attention and feed-forward."""

from abc import abstractmethod
from typing import ClassVar

from regard.nn.core import Branch, Site
from regard.tree import Spec


class BranchSpec(Spec):
    """Abstract base class of specs for branches: the sublayers of a block, such as attention and feed-forward."""

    __slots__ = ()
    attends: ClassVar[bool] = False  # whether the stack's position scheme and attention pattern apply
    packs: ClassVar[bool] = True  # whether the branch keeps the texts of a packed batch row apart
    ordered: ClassVar[bool] = False  # whether token order matters without a position scheme, as in a convolution

    @abstractmethod
    def build(self, site: Site) -> Branch:
        """Build the branch with the sizes and weight factories of `site`."""
