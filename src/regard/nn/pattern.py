"""Attention patterns, which hide keys from a query in addition to causality and segments."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, no_type_check

from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import SpecError
from regard.tree import Spec


class AttentionPattern(Spec):
    """The pattern slot: the specs that select the keys of a query by position."""

    __slots__ = ()
    may_hide_all: ClassVar[bool] = True  # whether a query may have no visible key, not even itself

    @property
    def reach(self) -> int | None:
        """The largest distance to an earlier key that a query attends to, apart from the `first` keys (None: any)."""
        return None

    @property
    def first(self) -> int:
        """The number of keys at the start of a sequence that all later queries may attend to, besides `reach`."""
        return 0

    @abstractmethod
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        """Return whether the query at position q attends to the key at position k. `q` and `k` broadcast."""


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
