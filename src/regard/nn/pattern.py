"""Attention patterns, such as a sliding window: restrictions of attention in addition to causality and padding."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, no_type_check

from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import SpecError
from regard.tree import Spec


class AttentionPattern(Spec):
    """Abstract base class of attention patterns: specs that select, by position, the keys each query attends to."""

    __slots__ = ()
    may_hide_all: ClassVar[bool] = True  # whether a query may have no visible key, not even itself

    @property
    def reach(self) -> int | None:
        """Largest distance from a query to a visible earlier key, not counting the `first` keys. None: no limit."""
        return None

    @property
    def first(self) -> int:
        """Number of keys at the start of a sequence that queries may attend to even at distances above `reach`."""
        return 0

    @abstractmethod
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        """Return whether queries at positions q attend to keys at positions k. The shapes of q and k are broadcast."""


@dataclass(frozen=True, slots=True)
class Window(AttentionPattern):
    """Sliding window: |i - j| < size. A causal query attends to the last `size` positions (CS 182, 17.4)."""

    kind = "window"
    may_hide_all = False
    size: int = 256

    def check(self) -> None:
        if self.size < 1:
            raise SpecError("size", f"a window must hold at least one position, not {self.size}")

    @property
    def reach(self) -> int:
        return self.size - 1

    @no_type_check  # FlexAttention traces this function for a single pair and cannot trace a shape check
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        return (q - k).abs() < self.size
