"""A KV cache that the beams of a source share. Reordering beams changes their ancestry and copies no keys.

A slot of the cache holds the key and value of one token. The tokens of a beam are in the slots that the beam and its
ancestors wrote (`BeamAncestry`). Attention runs over all slots of a source, with the queries of all beams in one batch
row. A mask (`BeamMask`) hides the slots that belong to other beams.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.nn.cache import Rewritten, Rows
from regard.nn.mask import Mask, View
from regard.nn.terms import Terms


class BeamAncestry:
    """Table of the cache slots that hold the tokens of each beam. Reordering beams changes the table and moves no keys.

    The table has a row for every beam of every source, and a column for every token that a beam reads in this decoding
    session, including padding. In column c, beam b writes its token to slot (c, b) of its source. Slots are never
    overwritten. A beam may continue another beam, so its token in column c may be in the slot of that other beam:
    `at[row, c]` is the beam that wrote the slot, or `beams` if the row has no token in column c.

    In a static decoding session, columns are counted for each source, so that sources may start at different steps.
    """

    def __init__(self, rows: int, beams: int, max_len: int, device: torch.device, static: bool) -> None:
        self.beams, self.static = beams, static
        self.each: Int[Tensor, " k"] = torch.arange(beams, device=device)
        self.own: Int[Tensor, "B 1"] = self.each.repeat(rows // beams)[:, None]
        self.at: Int[Tensor, "B N"] = torch.full((rows, max_len), beams, device=device)
        # The position of each token in its text. None: prompts are equally long, so the position is the column.
        self.places: Int[Tensor, "B N"] | None = None
        self.plain: Int[Tensor, " M"] = torch.arange(max_len, device=device).repeat_interleave(beams)
        self.column: Int[Tensor, " b"] = torch.zeros(rows // beams, dtype=torch.int64, device=device)  # the next column
        # If static: the first slot of every beam, counted over all sources, and the slots of this step.
        sources = torch.arange(rows // beams, device=device)[:, None]
        self.begin: Int[Tensor, "b k"] = sources * (max_len * beams) + self.each
        self.here: Int[Tensor, " n"] | None = None
        self.numbers: Float[Tensor, "n k"] | None = None  # row `at[i, c]` is added to the scores in column c

    def enter(self, T: int, bound: int, places: Int[Tensor, "B T"]) -> None:
        """Assign slots to the next T tokens of every row (beam). The positions of the tokens are `places`.

        The slots are in the columns from `bound` on or, in a static session, from the next column of each source on.
        Calling the method again with equal arguments changes nothing.
        """
        self._write(self.at, self.own.expand(-1, T), bound)
        if self.static:
            self.here = torch.add(self.begin[:, None], self.columns(T)[:, :, None], alpha=self.beams).flatten()
        if self.places is not None:
            self._write(self.places, places, bound)

    def leave(self, T: int, bound: int, counts: Int[Tensor, " B"] | None) -> None:
        """Record that every row (beam) has read T tokens, from column `bound` on.

        The first `counts[i]` tokens of row i are real, the others are padding. If `counts` is None, all tokens are
        real.
        """
        if counts is not None:
            if self.places is None:
                self.places = torch.arange(self.at.shape[1], device=self.at.device).repeat(self.at.shape[0], 1)
            real = torch.arange(T, device=counts.device) < counts[:, None]
            self._write(self.at, self.own.expand(-1, T).masked_fill(~real, self.beams), bound)
        self.column += T

    def columns(self, T: int) -> Int[Tensor, "b T"]:
        """Return the indices of the next T columns of every source, as a tensor that a CUDA graph can read."""
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

    def visible(self, T: int, S: int) -> Bool[Tensor, "b N M"]:
        """Return which of M cache slots each of N queries may attend to.

        There are N = beams * T queries, T for each beam, and M = S * beams slots, in the first S columns.
        """
        at = self.at[:, :S].unflatten(0, (-1, self.beams))
        on_path = (at[..., None] == self.each).flatten(2)  # (b, beams, S * beams)
        return on_path.repeat_interleave(T, 1) if T > 1 else on_path

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of the additive mask, which must be the dtype of the keys."""
        if self.numbers is None or self.numbers.dtype != dtype:
            here = torch.eye(self.beams + 1, self.beams, dtype=torch.bool, device=self.at.device)
            self.numbers = torch.full(here.shape, -torch.inf, dtype=dtype, device=here.device).masked_fill_(here, 0.0)

    def additive(self, S: int) -> Float[Tensor, "b 1 k M"] | None:
        """Return `visible` for one query per beam as an additive mask, or None if `set_dtype` has not been called."""
        return None if self.numbers is None else self.numbers[self.at[:, :S]].view(-1, 1, self.beams, S * self.beams)

    def slots(self, S: int) -> Int[Tensor, "#b M"]:
        """Return the position (in its text) of the token in every slot of the first S columns."""
        if self.places is None:
            return self.plain[None, : S * self.beams]
        return self.places[:, :S].unflatten(0, (-1, self.beams)).transpose(1, 2).flatten(1)

    def reorder(self, parent: Int[Tensor, " B"], reach: int) -> None:
        """Reorder the first `reach` columns so that row (beam) i continues row parent[i]."""
        live = self.at[:, :reach]
        live.copy_(live.index_select(0, parent))

    def clear(self, rows: Int[Tensor, " n"]) -> None:
        """Reset the rows (beams) listed in `rows`. If one beam of a source is listed, all its beams must be listed."""
        self.at.index_fill_(0, rows, self.beams)
        self.column.index_fill_(0, rows // self.beams, 0)

    def keep(self, rows: Int[Tensor, " n"]) -> None:
        """Keep only the rows (beams) listed in `rows`, in this order.

        If one beam of a source is listed, all beams of the source must be listed.
        """
        self.at, self.own = self.at.index_select(0, rows), self.own[: rows.shape[0]]
        self.column = self.column.index_select(0, rows[:: self.beams] // self.beams)
        if self.places is not None:
            self.places = self.places.index_select(0, rows)


@dataclass(frozen=True, slots=True)
class BeamMask(Mask):
    """Mask between the queries of all beams of a source and its cache slots. A beam attends only to its own tokens."""

    on_path: Callable[[], Bool[Tensor, "b N M"]] | None = None
    one_step: bool = False  # every beam reads one token, so causality hides nothing

    def conditions(self, T: int, S: int, device: torch.device) -> list[Bool[Tensor, "b t S"]]:
        assert self.on_path is not None
        causal = self.causal and (self.strict or not self.one_step)
        rest = Mask.conditions(self if causal == self.causal else replace(self, causal=False), T, S, device)
        return [*rest, self.on_path()]


@dataclass(frozen=True, slots=True)
class BeamView(View):
    """`View` (mask and sizes) in which every beam is a batch row, for layers without a shared cache.

    `beams` is the view for layers with a shared cache, in which all beams of a source are in one batch row.
    """

    beams: View | None = None

    def with_mask(self, **changes: Any) -> View:
        assert self.beams is not None
        alone = View(self.mask, self.T, self.S, self.device, self.terms, self.lowered, self.shared, self.by_heads)
        return _beam_view(alone.with_mask(**changes), self.beams.with_mask(**changes))

    def with_positions(self, position: Callable[[View], Terms] | None, by_heads: Any = None) -> View:
        assert self.beams is not None
        # `alone` is for layers without a shared cache, where every beam is a row.
        alone = View(self.mask, self.T, self.S, self.device, self.terms, self.lowered, self.shared, self.by_heads)
        return _beam_view(alone.with_positions(position, by_heads), self.beams.with_positions(position, by_heads))


def _beam_view(alone: View, beams: View) -> BeamView:
    return BeamView(
        alone.mask, alone.T, alone.S, alone.device, alone.terms, alone.lowered, alone.shared, alone.by_heads, beams
    )


@dataclass(slots=True)
class SharedRows(Rows):
    """Rows (beams) of a decoding session in which the beams of a source share the self-attention caches."""

    ancestry: BeamAncestry = field(kw_only=True)

    def view(self, T: int, prefix: Int[Tensor, " B"] | None = None) -> View:
        S, device = self.reach(T), self.lengths.device
        beams = View(self.beam_mask(T, prefix), T * self.beams, S * self.beams, device)
        numbers = self.ancestry.additive(S) if T == 1 else None
        if numbers is not None:  # found by one table lookup, which is faster than computing the mask
            beams.lowered["additive", numbers.dtype] = numbers
        return _beam_view(View(self.mask(T, prefix), T, S, device), beams)

    def beam_mask(self, T: int, prefix: Int[Tensor, " B"] | None = None) -> BeamMask:
        """Return the mask with all beams of a source in one batch row: beams * T queries, beams * S cache slots."""
        S, beams = self.reach(T), self.beams
        places = self.positions(T)
        self.ancestry.enter(T, self.bound, places)
        slots = self.ancestry.slots(S)
        shared = None
        if prefix is not None:  # prefix of the row that wrote each slot; it matters only while the prompt is read
            shared = (slots.unflatten(1, (S, beams)) < prefix.unflatten(0, (-1, 1, beams))).flatten(1)
        return BeamMask(
            causal=True,
            q_pos=places[:beams].flatten()[None] if self.uniform else places.unflatten(0, (-1, beams)).flatten(1),
            k_pos=slots,
            prefix=shared,
            longest=S,
            on_path=partial(self.ancestry.visible, T, S),
            one_step=T == 1,
        )

    def advance(self, T: int, counts: Int[Tensor, " B"] | None) -> None:
        if not self.counted:
            self.ancestry.leave(T, self.bound, counts)
        Rows.advance(self, T, counts)

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        Rows.reorder(self, parent)
        self.ancestry.reorder(parent, self.reach(0))

    def restart(self, rows: Int[Tensor, " n"]) -> None:
        Rows.restart(self, rows)
        self.ancestry.clear(rows)

    def follow(self, read: Int[Tensor, "b k"]) -> None:
        Rows.follow(self, read)
        self.ancestry.column = read[:, 0]

    def keep(self, rows: Int[Tensor, " n"]) -> None:
        Rows.keep(self, rows)
        self.ancestry.keep(rows)


def shared_rows(sources: int, beams: int, device: torch.device, max_len: int, static: bool) -> Rows:
    """Return the `Rows` (one per beam) of a new decoding session. Several beams of a source share their caches."""
    rows = Rows.start(sources, beams, device, max_len, static)
    if beams == 1:
        return rows
    ancestry = BeamAncestry(sources * beams, beams, max_len, device, static)
    return SharedRows(rows.lengths, max_len, beams, uniform=not static, static=static, ancestry=ancestry)


class BeamCache(Rewritten):
    """KV cache of self-attention that the beams of a source share. Beam b writes its c-th token to slot c * beams + b.

    Keys and values are never moved, because the ancestry of a beam lists the slots that the beam may attend to. In a
    static decoding session, the key and the value in a slot are adjacent in memory, so that both are written at once.
    """

    def __init__(self, rows: "SharedRows") -> None:
        self.rows, self.beams = rows, rows.beams
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.both: Tensor | None = None  # in a static decoding session: keys and values, (sources * slots, width)

    def append(
        self, k: Float[Tensor, "b G N K"], v: Float[Tensor, "b G N V"], view: View
    ) -> tuple[Float[Tensor, "b G M K"], Float[Tensor, "b G M V"], View]:
        """Store new keys and values (ordered by beam). Return the keys and values of all slots so far, and `view`."""
        self.rows.ancestry.set_dtype(k.dtype)
        T = k.shape[2] // self.beams
        if T > 1:
            k, v = (new.unflatten(2, (self.beams, T)).transpose(2, 3).flatten(2, 3) for new in (k, v))
        reach, room = self.rows.reach(T) * self.beams, self.rows.max_len * self.beams
        if self.rows.static:
            return *self._append_adjacent(k, v, reach, room), view
        if self.keys is None or self.values is None:
            self.keys = k.new_zeros(*k.shape[:2], room, k.shape[3])
            self.values = v.new_zeros(*v.shape[:2], room, v.shape[3])
        at = self.rows.bound * self.beams
        self.keys[:, :, at : at + k.shape[2]] = k
        self.values[:, :, at : at + v.shape[2]] = v
        return self.keys[:, :, :reach], self.values[:, :, :reach], view

    def _append_adjacent(
        self, k: Float[Tensor, "b G N K"], v: Float[Tensor, "b G N V"], reach: int, room: int
    ) -> tuple[Tensor, Tensor]:
        assert self.rows.ancestry.here is not None
        new, widths = side_by_side(k, v), (k.shape[1] * k.shape[3], v.shape[1] * v.shape[3])
        if self.both is None:
            self.both = new.new_zeros(k.shape[0] * room, sum(widths))
        self.both.index_copy_(0, self.rows.ancestry.here, new)
        parts = self.both.unflatten(0, (-1, room))[:, :reach].split_with_sizes(widths, 2)
        keys, values = (part.unflatten(2, (k.shape[1], -1)).transpose(1, 2) for part in parts)
        return keys, values

    def apart(self, weights: Float[Tensor, "b H N M"], slots: Int[Tensor, "#b M"]) -> Float[Tensor, "B H T S"]:
        """Convert attention `weights` over cache slots to weights over token positions, with one batch row per beam.

        `slots` has the position of the token in each slot.
        """
        at = slots[:, None, None].expand_as(weights)
        by_place = weights.new_zeros(*weights.shape[:3], weights.shape[3] // self.beams).scatter_add(-1, at, weights)
        return by_place.unflatten(2, (self.beams, -1)).transpose(1, 2).flatten(0, 1)

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Do nothing: a beam and its parent share the cache, and `SharedRows` reorders the ancestry."""

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Keep only the keys and values of the sources listed in `sources`, in this order."""
        if self.keys is None or self.values is None:
            return
        n, live = sources.shape[0], self.rows.reach(0) * self.beams
        for cache in (self.keys, self.values):
            cache[:n, :, :live] = cache[:, :, :live].index_select(0, sources)
        self.keys, self.values = self.keys[:n], self.values[:n]


def side_by_side(k: Float[Tensor, "b G N K"], v: Float[Tensor, "b G N V"]) -> Float[Tensor, "n W"]:
    """Return the key and value of each token in one row of a matrix, without a copy if they are adjacent in memory."""
    flat_k, flat_v = (x.transpose(1, 2).flatten(2).flatten(0, 1) for x in (k, v))
    rows, width, step = flat_k.shape[0], flat_k.shape[1] + flat_v.shape[1], flat_k.stride(0)
    adjacent = (
        flat_k.untyped_storage().data_ptr() == flat_v.untyped_storage().data_ptr()
        and flat_k.storage_offset() + flat_k.shape[1] == flat_v.storage_offset()
        and flat_k.stride() == flat_v.stride() == (step, 1)
        and (step >= width or rows == 1)
    )
    return flat_k.as_strided((rows, width), (step, 1)) if adjacent else torch.cat((flat_k, flat_v), -1)
