"""The state of an autoregressive decoding session, updated at each step."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.batch import readable, require_data
from regard.nn.cache import Droppable, Rows
from regard.nn.mask import Mask, View
from regard.nn.memory import Memory
from regard.nn.trace import Trace


@dataclass(slots=True)
class Decoding:
    """State of a decoding session: number of tokens read per row, cached states of the layers, and encoded source."""

    rows: Rows
    states: list[Any]
    beams: int = 1
    memory: Memory | None = None
    cross: View | None = None
    prefix: Int[Tensor, " B"] | None = None  # length of the prefix in each row of a prefix LM
    trace: Trace | None = None
    prefill_chunk: int | None = None  # maximum number of tokens that are processed at a time; None: no maximum

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Reorder the state so that row i continues row parent[i], which must be a beam of the same source."""
        rows = self.rows.lengths.shape[0]
        require_data(parent.shape == (rows,), f"parent: needs one index per row ({rows}), not {tuple(parent.shape)}")
        valid = not readable(parent) or torch.equal(parent // self.beams, torch.arange(rows) // self.beams)
        require_data(valid, "parent: a beam can only continue a beam of its own source")
        self.rows.reorder(parent)
        if self.prefix is not None:
            self.prefix.copy_(self.prefix.index_select(0, parent))
        for state in flat(self.states):
            state.reorder(parent)

    def droppable(self) -> bool:
        """Return whether `keep` can drop rows. Shapes must not be static, and cached states must be `Droppable`."""
        return not self.rows.static and all(isinstance(state, Droppable) for state in flat(self.states))

    def keep(self, sources: Int[Tensor, " s"]) -> None:
        """Keep only the beams of the sources listed in `sources`, in the listed order, and drop all other beams."""
        static = "sources: a static decoding session cannot drop sources; start a new session"
        require_data(not self.rows.static, static)
        stuck = [type(state).__name__ for state in flat(self.states) if not isinstance(state, Droppable)]
        require_data(not stuck, f"sources: {', '.join(stuck[:1])} cannot drop rows; keep all rows until the end")
        rows = (sources[:, None] * self.beams + torch.arange(self.beams, device=sources.device)).flatten()
        for state in flat(self.states):
            state.keep(rows, sources)
        self.rows.keep(rows)
        self.prefix = select(self.prefix, rows)
        if self.memory is not None:
            memory = tuple(x.index_select(0, sources) for x in self.memory.x)
            self.memory = Memory(memory, select(self.memory.seg, sources))
        if self.cross is not None:
            mask = replace(self.cross.mask, k_seg=select(self.cross.mask.k_seg, sources))
            self.cross = replace(self.cross, mask=mask, lowered={}, shared={})

    def own_view(self, T: int) -> View:
        """Return the self-attention `View` (mask and sizes) for T new tokens per row."""
        return self.rows.view(T, self.prefix)

    def cross_view(self, T: int) -> View | None:
        """Return the cross-attention `View` (mask and sizes) for T new tokens per beam, or None."""
        if self.cross is not None and T * self.beams != self.cross.T:
            self.cross = replace(self.cross, T=T * self.beams, lowered={}, shared={})
        return self.cross


def select(x: Tensor | None, rows: Int[Tensor, " r"]) -> Tensor | None:
    """Return the rows of `x` with the indices `rows`, or None if `x` is None."""
    return None if x is None else x.index_select(0, rows)


def flat(states: Iterable[Any]) -> Iterator[Any]:
    """Yield the cached states in `states`, which may contain nested tuples. Entries that are None are skipped."""
    for state in states:
        if isinstance(state, tuple):
            yield from flat(state)
        elif state is not None:
            yield state


def last_real(x: Float[Tensor, "B T D"], counts: Int[Tensor, " B"] | None) -> Float[Tensor, "B D"]:
    """Return the hidden state of each row at its last real token. Row i has `counts[i]` real tokens (default: all)."""
    if counts is None:
        return x[:, -1]
    return x[torch.arange(x.shape[0], device=x.device), (counts - 1).clamp(min=0)]


def padding_mask(seg: Int[Tensor, "B S"] | None, static: bool = False) -> Mask:
    """Return the cross-attention mask that hides padding of the source, or an empty mask if there is no padding.

    With `static`, the mask contains `seg` even without padding, because sources that replace the current ones may have
    padding.
    """
    if seg is None or (not static and bool((seg != 0).all())):
        return Mask()
    return Mask(k_seg=seg)
