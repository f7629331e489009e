"""Engine slot: what computes the best hypotheses of many sources; `regard.inference.text` converts text."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.search import Search

Sources = Sequence[Sequence[int]]


class Engine(ABC):
    """Abstract: computes the best hypotheses of sources.

    Two engines that accept the same search return the same; an engine refuses, by name, what it cannot do exactly.
    """

    name: ClassVar[str]

    @abstractmethod
    def check(self, search: Search, limits: Limits, rules: TokenConstraints) -> None:
        """Refuse what the engine cannot do exactly, before anything is read."""

    @abstractmethod
    def find(
        self,
        sources: Sources,
        search: Search,
        batch_size: int,
        limits: Limits,
        rules: TokenConstraints,
        rows: Sequence[int],
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of every source, best first; `rows` are their numbers, which seed a sample."""
