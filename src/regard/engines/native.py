"""The native engine: our models in torch, and any search over them."""

from collections.abc import Sequence

import torch

from regard.batch import Batch, pad
from regard.data.store import chunks
from regard.decoding.hypothesis import Ends, Hypothesis, Limits
from regard.decoding.rules import Rules
from regard.decoding.search import Search, find
from regard.engines.base import Engine, Sources
from regard.models.base import Generator


class Native(Engine):
    """One model, or several as an ensemble. Nothing is refused here: a search checks itself."""

    name = "native"

    def __init__(self, models: Sequence[Generator], ends: Ends, device: torch.device) -> None:
        self.models, self.ends, self.device = models, ends, device

    def check(self, search: Search, limits: Limits, rules: Rules) -> None:
        """Nothing to refuse."""

    def find(
        self, sources: Sources, search: Search, batch_size: int, limits: Limits, rules: Rules, rows: Sequence[int]
    ) -> list[list[Hypothesis]]:
        found: dict[int, list[Hypothesis]] = {}
        for places in by_length(sources, batch_size):
            ids, seg = pad([sources[place] for place in places])
            batch = Batch(ids, source=ids, source_seg=seg).to(self.device)
            numbers = [rows[place] for place in places]
            results = find(self.models, batch, search, self.ends, limits, rules, numbers)
            found |= dict(zip(places, results, strict=True))
        return [found[place] for place in range(len(sources))]


def by_length(rows: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Places of rows of like length together, the longest first: what does not fit into memory fails at once."""
    return list(chunks(sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i)), batch_size))
