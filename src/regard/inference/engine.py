"""The base class of inference engines. Engines work on token ids; `regard.inference.text` encodes and decodes text."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits, Piece
from regard.decoding.search import Search
from regard.errors import SpecError

Sources = Sequence[Sequence[int]]


class Engine(ABC):
    """Abstract base class of engines, which decode sources with a model.

    Any two engines that accept a search return equal hypotheses. An engine raises an error for every option that the
    engine cannot implement exactly, and the error names the option.
    """

    name: ClassVar[str]

    def adapted(self, search: Search, warn: Callable[[str], None]) -> Search:  # noqa: ARG002
        """Return the search that this engine performs instead of `search`, and call `warn` if the two differ."""
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

    def extend(
        self,
        prompts: Sources,  # noqa: ARG002
        search: Search,  # noqa: ARG002
        batch_size: int,  # noqa: ARG002
        limits: Sequence[Limits],  # noqa: ARG002
        rules: TokenConstraints,  # noqa: ARG002
        rows: Sequence[int],  # noqa: ARG002
    ) -> list[list[Hypothesis]]:
        """Return the continuations of every prompt, best first. There is one value of `limits` per prompt."""
        raise SpecError("--engine", f"the engine {self.name!r} only translates; use --engine native")

    def stream(
        self,
        ids: Sequence[int],  # noqa: ARG002
        search: Search,  # noqa: ARG002
        limits: Limits,  # noqa: ARG002
        rules: TokenConstraints,  # noqa: ARG002
        row: int,  # noqa: ARG002
        translates: bool,  # noqa: ARG002
    ) -> Iterator[list[Piece]]:
        """Decode one source (`translates`) or one prompt, and yield its new tokens after each step."""
        raise SpecError("--stream", f"the engine {self.name!r} returns only whole outputs; use --engine native")
