"""The base class of search methods, and functions that decode a batch of sources or prompts with a model."""

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
Finished = list[tuple[int, list[Hypothesis]]]  # batch rows that are finished, with their hypotheses, best first


class Search(Spec):
    """Base class of search methods (beam search, sampling), which choose the tokens of an output."""

    __slots__ = ()

    @abstractmethod
    def find(self, job: Job) -> list[list[Hypothesis]]:
        """Return the hypotheses for every batch row, best first."""

    def find_each(self, jobs: Sequence[Job]) -> Iterator[list[list[Hypothesis]]]:
        """Yield the result of `find` for each job. A subclass may process several jobs at once for speed."""
        return map(self.find, jobs)

    def find_by_row(self, job: Job) -> Iterator[Finished]:
        """Decode as `find` does, on the host. Yield each row once it is finished, and [] after the other steps.

        A subclass that decodes all rows at once yields only one list.
        """
        yield list(enumerate(self.find(job)))

    def stream(self, job: Job) -> Iterator[list[Piece]]:  # noqa: ARG002
        """Yield the new tokens of every batch row after each step. Searches that revise tokens raise SpecError."""
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
    is not read. Otherwise the target rows are prompts, and the hypotheses are continuations of the prompts. `limits`
    and `rules` are either one value for all rows or a sequence with one value per row. `rows` are the indices of the
    batch rows in the whole input (default: 0, 1, ...). They determine the random numbers of sampling. The result for a
    row does not depend on other rows.
    """
    _check_bound(search)
    return search.find(prepare(models, batch, ends, limits, rules, rows, prefill_chunk(search)))


def stream(
    models: Generator | Sequence[Generator],
    batch: Batch,
    search: Search,
    ends: SpecialTokens,
    limits: Limits | Sequence[Limits] = DERIVED,
    rules: TokenConstraints | Sequence[TokenConstraints] = FREE,
    rows: Sequence[int] | None = None,
) -> Iterator[list[Piece]]:
    """Decode as `find` does. After each step, yield the new tokens of the rows that have not ended.

    The concatenated ids of a row's pieces are the ids of its hypothesis. The last piece contains the whole hypothesis.
    """
    _check_bound(search)
    return search.stream(prepare(models, batch, ends, limits, rules, rows, prefill_chunk(search)))


def prefill_chunk(search: Search) -> int | None:
    """Return the maximum number of input tokens that are processed at a time; None: no maximum."""
    return getattr(search, "prefill_chunk", None)  # a search of the user may have no such field


def _check_bound(search: Search) -> None:
    """Raise SpecError if the search has constraints. They need a tokenizer, and `find` works on token ids only."""
    if getattr(search, "constraints", ()):
        raise SpecError("constraints", "need a tokenizer; bind them (`Constraint.bind`) and give them as `rules`")
