"""Engine: whoever finds what a model says to many sources. Texts go in and come out at regard.inference.text."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.search import Search

Sources = Sequence[Sequence[int]]


class Engine(ABC):
    """Abstract: finds the best hypotheses for sources, whatever it computes them with.

    Two engines that accept the same search find the same; what one cannot do exactly as asked it refuses by name.
    """

    name: ClassVar[str]

    @abstractmethod
    def check(self, search: Search, limits: Limits, rules: TokenConstraints) -> None:
        """Refuse what could not be done exactly as asked, before anything is read."""

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
        """What is found for every source, best first; `rows` are the numbers by which a sample knows them."""
