"""Beams that share one cache: what a beam has read, as the path of its ancestors through the slots of its source."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class BeamAncestry:
    """Which slots of its source hold what each beam has read. Reordering moves these numbers and no keys.

    What beam b reads in column c (the c-th token of this decoding, padding included) is written into slot (c, b) of its
    source, stays there, and is never written again. A row remembers for every column in whose slot its ancestor wrote:
    `at[row, c]`, or `beams` where it has read nothing.

    In a static decoding every source counts its own columns, so that sources may begin at different steps.
    """

    def __init__(self, rows: int, beams: int, max_len: int, device: torch.device, static: bool) -> None:
        self.beams, self.static = beams, static
        self.each: Int[Tensor, " k"] = torch.arange(beams, device=device)
        self.own: Int[Tensor, "B 1"] = self.each.repeat(rows // beams)[:, None]
        self.at: Int[Tensor, "B N"] = torch.full((rows, max_len), beams, device=device)
        # Where the token of each slot stands in its row: its column, but after prompts of unequal length.
        self.places: Int[Tensor, "B N"] | None = None
        self.plain: Int[Tensor, " M"] = torch.arange(max_len, device=device).repeat_interleave(beams)
        self.column: Int[Tensor, " b"] = torch.zeros(rows // beams, dtype=torch.int64, device=device)  # the next one
        # In a static decoding: the first slot of every beam, counted over all sources, and those that are written now.
        sources = torch.arange(rows // beams, device=device)[:, None]
        self.begin: Int[Tensor, "b k"] = sources * (max_len * beams) + self.each
        self.here: Int[Tensor, " n"] | None = None
        self.numbers: Float[Tensor, "n k"] | None = None  # what to add to scores, for each answer of `at`

    def enter(self, T: int, bound: int, places: Int[Tensor, "B T"]) -> None:
        """Every row reads T tokens at these places, from column `bound` on, into slots of its own. May be repeated."""
        self._write(self.at, self.own.expand(-1, T), bound)
        if self.static:
            self.here = torch.add(self.begin[:, None], self.columns(T)[:, :, None], alpha=self.beams).flatten()
        if self.places is not None:
            self._write(self.places, places, bound)

    def leave(self, T: int, bound: int, counts: Int[Tensor, " B"] | None) -> None:
        """Note that the T tokens from column `bound` on were read, of which `counts` per row were real (None: all)."""
        if counts is not None:
            if self.places is None:
                self.places = torch.arange(self.at.shape[1], device=self.at.device).repeat(self.at.shape[0], 1)
            real = torch.arange(T, device=counts.device) < counts[:, None]
            self._write(self.at, self.own.expand(-1, T).masked_fill(~real, self.beams), bound)
        self.column += T

    def columns(self, T: int) -> Int[Tensor, "b T"]:
        """The next T columns of every source, as a tensor that a captured step can read."""
        first = self.column[:, None]
        return first if T == 1 else first + torch.arange(T, device=self.column.device)

    def _write(self, table: Int[Tensor, "B N"], values: Int[Tensor, "B T"], bound: int) -> None:
        T = values.shape[1]
        if self.static:
            shape = (-1, self.beams)
            at = self.columns(T)[:, None].expand(-1, self.beams, -1)
            table.unflatten(0, shape).scatter_(2, at, values.unflatten(0, shape))
        else:
            table[:, bound : bound + T] = values

    def shown(self, T: int, S: int) -> Bool[Tensor, "b N M"]:
        """Which of a source's slots in the first S columns lie on the path of T queries of each of its beams."""
        at = self.at[:, :S].unflatten(0, (-1, self.beams))
        found = at[..., None] == self.each  # (b, beams, S, beams)
        return found.flatten(2).repeat_interleave(T, 1) if T > 1 else found.flatten(2)

    def hold(self, dtype: torch.dtype) -> None:
        """Know what is in the slots, and so what `added` has to look up."""
        if self.numbers is None or self.numbers.dtype != dtype:
            here = torch.eye(self.beams + 1, self.beams, dtype=torch.bool, device=self.at.device)
            self.numbers = torch.full(here.shape, -torch.inf, dtype=dtype, device=here.device).masked_fill_(here, 0.0)

    def added(self, S: int) -> Float[Tensor, "b 1 k M"] | None:
        """The same for one query of each beam, as numbers to be added to scores; None before their type is known."""
        return None if self.numbers is None else self.numbers[self.at[:, :S]].view(-1, 1, self.beams, S * self.beams)

    def slots(self, S: int) -> Int[Tensor, "#b M"]:
        """Where the tokens in the slots of the first S columns stand in their rows."""
        if self.places is None:
            return self.plain[None, : S * self.beams]
        return self.places[:, :S].unflatten(0, (-1, self.beams)).transpose(1, 2).flatten(1)

    def reorder(self, parent: Int[Tensor, " B"], reach: int) -> None:
        """Row i has read what row parent[i] has."""
        live = self.at[:, :reach]
        live.copy_(live.index_select(0, parent))

    def clear(self, rows: Int[Tensor, " n"]) -> None:
        """These rows have read nothing yet: all beams of some sources."""
        self.at.index_fill_(0, rows, self.beams)
        self.column.index_fill_(0, rows // self.beams, 0)

    def keep(self, rows: Int[Tensor, " n"]) -> None:
        """Only these rows go on, in this order: all beams of some sources."""
        self.at, self.own = self.at.index_select(0, rows), self.own[: rows.shape[0]]
        self.column = self.column.index_select(0, rows[:: self.beams] // self.beams)
        if self.places is not None:
            self.places = self.places.index_select(0, rows)
