"""Search slot, and the functions that decode a batch of sources or prompts with a model."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from regard.batch import Batch
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits, Piece, SpecialTokens
from regard.decoding.job import Job, prepare
from regard.errors import SpecError
from regard.models.base import Generator
from regard.tree import Spec

DERIVED = Limits()  # from the length of each source
FREE = TokenConstraints()


class Search(Spec):
    """Slot: how the next token is chosen."""

    __slots__ = ()

    @abstractmethod
    def find(self, job: Job) -> list[list[Hypothesis]]:
        """Return the hypotheses of every row, best first."""

    def find_each(self, jobs: Sequence[Job]) -> Iterator[list[list[Hypothesis]]]:
        """Yield the hypotheses of several jobs, which may share computation without a change of results."""
        return map(self.find, jobs)

    def stream(self, job: Job) -> Iterator[list[Piece]]:  # noqa: ARG002
        """Yield the new tokens of every row at each step, for a search that never revises a token."""
        raise SpecError(
            "search", f"{self.kind!r} revises earlier tokens and cannot be streamed; use one beam or a sample"
        )


def find(
    models: Generator | Sequence[Generator],
    batch: Batch,
    search: Search,
    ends: SpecialTokens,
    limits: Limits | Sequence[Limits] = DERIVED,
    rules: TokenConstraints | Sequence[TokenConstraints] = FREE,
    rows: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Return the best hypotheses of every row of the batch: at most n_best of each, best first.

    Several models act as an ensemble. A batch with sources is translated: the decoder begins with bos, and a target in
    the batch is not read. Without sources, the target rows are prompts and what follows them is returned. `limits` and
    `rules` are one for all rows or one for each; `rows` are the numbers by which a sample knows its rows (their place
    in the batch if not given). The result of a row does not depend on the others.
    """
    _check_bound(search)
    return search.find(prepare(models, batch, ends, limits, rules, rows))


def stream(
    models: Generator | Sequence[Generator],
    batch: Batch,
    search: Search,
    ends: SpecialTokens,
    limits: Limits | Sequence[Limits] = DERIVED,
    rules: TokenConstraints | Sequence[TokenConstraints] = FREE,
    rows: Sequence[int] | None = None,
) -> Iterator[list[Piece]]:
    """Yield, after each step, the new tokens of the rows that have not ended.

    Joined, the pieces of a row are the ids of its hypothesis, which comes with its last piece.
    """
    _check_bound(search)
    return search.stream(prepare(models, batch, ends, limits, rules, rows))


def _check_bound(search: Search) -> None:
    """Refuse constraints that need a tokenizer, which only a search of texts has."""
    if getattr(search, "constraints", ()):
        raise SpecError("constraints", "need a tokenizer; bind them (`Constraint.bind`) and give them as `rules`")
