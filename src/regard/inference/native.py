"""The native engine, which decodes with the models of this package in PyTorch."""

from collections.abc import Iterator, Sequence, Sized

import torch

from regard.batch import Batch, pad
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits, Piece, SpecialTokens
from regard.decoding.job import Job, prepare
from regard.decoding.search import Search, prefill_chunk
from regard.inference.engine import Engine, Sources
from regard.models.base import Generator


class Native(Engine):
    """The native engine for one model or an ensemble. It accepts every search."""

    name = "native"

    def __init__(self, models: Sequence[Generator], ends: SpecialTokens, device: torch.device) -> None:
        self.models, self.ends, self.device = models, ends, device

    def check(self, search: Search, limits: Limits, rules: TokenConstraints) -> None:
        """Do nothing, because every search checks its own options."""

    def find(
        self,
        sources: Sources,
        search: Search,
        batch_size: int,
        limits: Limits,
        rules: TokenConstraints,
        rows: Sequence[int],
    ) -> list[list[Hypothesis]]:
        return self._find(sources, search, batch_size, [limits] * len(sources), rules, rows, translates=True)

    def extend(
        self,
        prompts: Sources,
        search: Search,
        batch_size: int,
        limits: Sequence[Limits],
        rules: TokenConstraints,
        rows: Sequence[int],
    ) -> list[list[Hypothesis]]:
        return self._find(prompts, search, batch_size, limits, rules, rows, translates=False)

    def stream(
        self,
        ids: Sequence[int],
        search: Search,
        limits: Limits,
        rules: TokenConstraints,
        row: int,
        translates: bool,
    ) -> Iterator[list[Piece]]:
        return search.stream(self.job([ids], [limits], [row], search, rules, translates))

    def _find(
        self,
        inputs: Sources,
        search: Search,
        batch_size: int,
        limits: Sequence[Limits],
        rules: TokenConstraints,
        rows: Sequence[int],
        translates: bool,
    ) -> list[list[Hypothesis]]:
        hypotheses: dict[int, list[Hypothesis]] = {}
        batches = by_length(inputs, batch_size)
        jobs = [
            self.job(
                [inputs[at] for at in places],
                [limits[at] for at in places],
                [rows[at] for at in places],
                search,
                rules,
                translates,
            )
            for places in batches
        ]
        for places, results in zip(batches, search.find_each(jobs), strict=True):
            hypotheses |= dict(zip(places, results, strict=True))
        return [hypotheses[place] for place in range(len(inputs))]

    def job(
        self,
        inputs: Sources,
        limits: Sequence[Limits],
        rows: Sequence[int],
        search: Search,
        rules: TokenConstraints | Sequence[TokenConstraints],
        translates: bool,
    ) -> Job:
        """Return the job of decoding one batch of sources (`translates`) or of prompts."""
        ids, seg = pad(inputs)
        batch = Batch(ids, source=ids, source_seg=seg) if translates else Batch(ids, target_seg=seg)
        chunk = prefill_chunk(search)
        return prepare(self.models, batch.to(self.device), self.ends, limits, rules, rows, chunk)


def by_length(rows: Sequence[Sized], batch_size: int, tokens: int | None = None) -> list[list[int]]:
    """Return batches of row indices, the longest rows first, so that running out of memory happens at the start.

    A batch has at most `batch_size` rows. If `tokens` is given, it has at most so many tokens with padding, or one row.
    """
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
    batches, first = list[list[int]](), 0
    while first < len(order):
        longest = max(1, len(rows[order[first]]))
        size = batch_size if tokens is None else max(1, min(batch_size, tokens // longest))
        batches.append(order[first : first + size])
        first += size
    return batches
