"""The engine slot: engines search for the best hypotheses of encoded sources; `regard.inference.text` converts text."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.search import Search

Sources = Sequence[Sequence[int]]


class Engine(ABC):
    """An abstract engine, which searches for the best hypotheses of sources.

    Any two engines that accept a search return equal hypotheses. An engine refuses every option that it cannot
    implement exactly, and the error names the option.
    """

    name: ClassVar[str]

    @abstractmethod
    def check(self, search: Search, limits: Limits, rules: TokenConstraints) -> None:
        """Refuse every option that the engine cannot implement exactly, before any input is read."""

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
        """Return the hypotheses of every source, best first.

        `rows` are the numbers of the sources, which seed random sampling.
        """
