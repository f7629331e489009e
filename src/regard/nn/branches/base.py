"""Base class of branches: the sublayers of a block, such as attention and feed-forward."""

from abc import abstractmethod
from typing import ClassVar, Protocol, runtime_checkable

from torch import nn

from regard.nn.core import Branch, Site
from regard.tree import Spec


@runtime_checkable
class Shared(Protocol):
    """Interface of specs for a module that several layers of a stack share.

    Layers whose specs are equal share one module.
    """

    def build(self, site: Site) -> nn.Module:
        """Build the module with the sizes and weight factories of the stack."""
        ...


class BranchSpec(Spec):
    """Abstract base class of specs for branches: the sublayers of a block, such as attention and feed-forward."""

    __slots__ = ()
    attends: ClassVar[bool] = False  # whether the stack's position scheme and attention pattern apply
    packs: ClassVar[bool] = True  # whether the branch keeps the texts of a packed batch row apart
    masked: ClassVar[bool] = True  # if it attends: whether it accepts the stack's attention pattern and strict mask
    ordered: ClassVar[bool] = False  # whether token order matters without a position scheme, as in a convolution

    @abstractmethod
    def build(self, site: Site) -> Branch:
        """Build the branch with the sizes and weight factories of `site`."""

    def shared(self) -> Shared | None:
        """Describe the module that all layers of this kind in a stack share, or return None if they share none.

        The stack builds the module once and passes it to its layers as `Context.shared[kind]`.
        """
        return None
