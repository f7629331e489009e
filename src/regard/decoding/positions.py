"""Limits on the tokens that a decoder can read: learned positions and synthesizers have tables of fixed size."""

from collections.abc import Sequence
from dataclasses import dataclass

from regard.models.base import Generator
from regard.tree import leaves


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions that all models of a decoding have; None: there is no such limit."""

    count: int | None
    source_first: bool = False  # a source is read as the beginning of the sequence, and takes up positions

    def left(self, read: int) -> int | None:
        """Return the number of tokens that can follow `read` tokens; the last one need not be read."""
        return None if self.count is None else self.count - read + 1


def positions(models: Sequence[Generator]) -> Positions:
    """Return the fewest positions of any table in a decoder or in its input, over all models."""
    tables = [
        value
        for model in models
        for path, value in leaves(model.spec)
        if path.rpartition(".")[2] == "max_len"
        and path.partition(".")[0] != "encoder"
        and type(value) is int  # None: the part has no limit
    ]
    return Positions(min(tables, default=None), any(model.source_first for model in models))
