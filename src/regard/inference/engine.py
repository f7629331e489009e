"""The base class of inference engines. Engines work on token ids; `regard.inference.text` encodes and decodes text."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.search import Search

Sources = Sequence[Sequence[int]]


class Engine(ABC):
    """Abstract base class of engines, which decode sources with a model.

    Any two engines that accept a search return equal hypotheses. An engine raises an error for every option that the
    engine cannot implement exactly, and the error names the option.
    """

    name: ClassVar[str]

    def adapted(self, search: Search, warn: Callable[[str], None]) -> Search:  # noqa: ARG002
        """Return the search of a recipe as this engine performs it, and call `warn` if that is another search."""
        return search

    @abstractmethod
    def check(self, search: Search, limits: Limits, rules: TokenConstraints) -> None:
        """Raise an error for an option that the engine cannot implement exactly. Called before any input is read."""

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

        `rows` are the indices of the sources in the whole input, which determine the random numbers of sampling.
        """
