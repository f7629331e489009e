"""The Search slot, and functions that decode a batch of sources or prompts with a model."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from regard.batch import Batch
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits, Piece, SpecialTokens
from regard.decoding.job import Job, prepare
from regard.errors import SpecError
from regard.models.base import Generator
from regard.tree import Spec

DERIVED = Limits()  # limits computed from the length of each source
FREE = TokenConstraints()


class Search(Spec):
    """The Search slot: a spec of the method that chooses the next token."""

    __slots__ = ()

    @abstractmethod
    def find(self, job: Job) -> list[list[Hypothesis]]:
        """Return the hypotheses for every row, best first."""

    def find_each(self, jobs: Sequence[Job]) -> Iterator[list[list[Hypothesis]]]:
        """Yield the hypotheses for each job. Jobs may share computation, which does not change the results."""
        return map(self.find, jobs)

    def stream(self, job: Job) -> Iterator[list[Piece]]:  # noqa: ARG002
        """Yield the new tokens of every row at each step. Only a search that never revises a token supports this."""
        raise SpecError(
            "search", f"{self.kind!r} revises earlier tokens and cannot be streamed; use beam size 1 or sampling"
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
    """Return the best hypotheses for every row of the batch: at most `n_best` for each row, best first.

    Several models form an ensemble. If the batch has sources, the decoder begins with bos, and the target in the batch
    is not read. Otherwise the target rows are prompts, and the hypotheses are their continuations. `limits` and `rules`
    are either one value for all rows or a sequence with one value per row. `rows` are the caller's numbers for the
    rows, from which a sampling search computes random numbers. Default: the indices in the batch. The result for a row
    does not depend on other rows.
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

    The concatenated pieces of a row are the ids of the row's hypothesis. The last piece also has the hypothesis itself.
    """
    _check_bound(search)
    return search.stream(prepare(models, batch, ends, limits, rules, rows))


def _check_bound(search: Search) -> None:
    """Raise SpecError if the search has constraints, because they need a tokenizer and a search on ids has none."""
    if getattr(search, "constraints", ()):
        raise SpecError("constraints", "need a tokenizer; bind them (`Constraint.bind`) and give them as `rules`")
