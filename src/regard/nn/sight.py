"""Sight: patterns that limit how far a query sees, beyond causality and segments."""

from abc import abstractmethod
from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import SpecError
from regard.tree import Spec


class Sight(Spec):
    """Slot: which keys are near enough to be seen, from positions alone."""

    __slots__ = ()

    @abstractmethod
    def visible(self, q: Int[Tensor, "b t 1"], k: Int[Tensor, "b 1 s"]) -> Bool[Tensor, "b t s"]:
        """Whether the query at position q sees the key at position k."""


@dataclass(frozen=True, slots=True)
class Window(Sight):
    """Sliding window: |i - j| < size. A decoder that keeps only the last `size` entries of its table (CS 182, 17.4)."""

    kind = "window"
    size: int = 256

    def check(self) -> None:
        if self.size < 1:
            raise SpecError("size", f"a window must hold at least one position, not {self.size}")

    def visible(self, q: Int[Tensor, "b t 1"], k: Int[Tensor, "b 1 s"]) -> Bool[Tensor, "b t s"]:
        return (q - k).abs() < self.size
