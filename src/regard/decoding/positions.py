"""Maximum number of tokens that a decoder can read. Learned positions and synthesizers have tables of fixed size."""

from collections.abc import Sequence
from dataclasses import dataclass

from regard.models.base import Generator
from regard.tree import leaves


@dataclass(frozen=True, slots=True)
class Positions:
    """The number of positions available in every model of an ensemble. If `count` is None, there is no limit."""

    count: int | None
    source_first: bool = False  # True: the sequence begins with the source, which takes up positions

    def left(self, read: int) -> int | None:
        """Return the number of tokens that can be generated after `read` tokens, or None if there is no limit."""
        return None if self.count is None else self.count - read + 1  # the last generated token is not read


def positions(models: Sequence[Generator]) -> Positions:
    """Return the number of positions of an ensemble: the size of the smallest fixed table outside the encoders."""
    tables = [
        value
        for model in models
        for path, value in leaves(model.spec)
        if path.rpartition(".")[2] == "max_len"
        and path.partition(".")[0] != "encoder"
        and type(value) is int  # None: the part has no limit
    ]
    return Positions(min(tables, default=None), any(model.source_first for model in models))
