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
    """The state of one decoding session: the row lengths, the cache of each call, and the memory of the source."""

    rows: Rows
    states: list[Any]
    beams: int = 1
    memory: Memory | None = None
    cross: View | None = None
    prefix: Int[Tensor, " B"] | None = None  # in a prefix LM: length of the prefix per row
    trace: Trace | None = None

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Make row i continue row parent[i], which must be a beam of the same source."""
        rows = self.rows.lengths.shape[0]
        require_data(parent.shape == (rows,), f"parent: needs one for each of {rows} rows, not {tuple(parent.shape)}")
        valid = not readable(parent) or torch.equal(parent // self.beams, torch.arange(rows) // self.beams)
        require_data(valid, "parent: a beam can only continue a beam of its own source")
        self.rows.reorder(parent)
        if self.prefix is not None:
            self.prefix.copy_(self.prefix.index_select(0, parent))
        for state in flat(self.states):
            state.reorder(parent)

    def droppable(self) -> bool:
        """Return whether `keep` is possible, which needs states that can drop rows, and shapes that may change."""
        return not self.rows.static and all(isinstance(state, Droppable) for state in flat(self.states))

    def keep(self, sources: Int[Tensor, " s"]) -> None:
        """Keep only the rows of `sources`, in this order, including all beams per source."""
        static = "sources: a static decoding keeps its shapes and cannot drop any; start it anew"
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
        """Return the view for T new tokens per row, which attend to the past and to each other."""
        return self.rows.view(T, self.prefix)

    def cross_view(self, T: int) -> View | None:
        """Return the view for T new tokens per beam, which attend to the memory. The view is cached for this T."""
        if self.cross is not None and T * self.beams != self.cross.T:
            self.cross = replace(self.cross, T=T * self.beams, lowered={}, shared={})
        return self.cross


def select(x: Tensor | None, rows: Int[Tensor, " r"]) -> Tensor | None:
    """Return the given rows of `x`, or None if `x` is None."""
    return None if x is None else x.index_select(0, rows)


def flat(states: Iterable[Any]) -> Iterator[Any]:
    """Yield every single state in `states`, whose entries are None, one state, or a tuple of entries."""
    for state in states:
        if isinstance(state, tuple):
            yield from flat(state)
        elif state is not None:
            yield state


def last_real(x: Float[Tensor, "B T D"], counts: Int[Tensor, " B"] | None) -> Float[Tensor, "B D"]:
    """Return the hidden state at the last of the `counts` real tokens per row (None: all are real)."""
    if counts is None:
        return x[:, -1]
    return x[torch.arange(x.shape[0], device=x.device), (counts - 1).clamp(min=0)]


def padding_mask(seg: Int[Tensor, "B S"] | None, static: bool = False) -> Mask:
    """Return the mask that hides padding in the memory, or an empty mask if there is no padding.

    With `static`, the mask contains `seg` even without padding, because later sources may have padding.
    """
    if seg is None or (not static and bool((seg != 0).all())):
        return Mask()
    return Mask(k_seg=seg)
