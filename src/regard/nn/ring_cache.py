"""A key-value cache of fixed size, for attention patterns that reach a limited distance back, such as a window."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.nn.cache import KVCache, Rewritten, Rows
from regard.nn.mask import View
from regard.nn.position.base import query_positions
from regard.nn.terms import Terms


class RingCache(Rewritten):
    """Key-value cache of the first `first` tokens and of the last `size` tokens of each batch row.

    Position p is stored in slot p if p < first, and otherwise in slot first + (p - first) mod size. There it overwrites
    the key of a token that no later query attends to. The memory does not grow with the number of tokens.
    """

    def __init__(self, rows: Rows, first: int, size: int) -> None:
        self.rows, self.first, self.size = rows, first, size
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T V"], view: View
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S V"], View]:
        """Store new keys and values. Return the keys and values to attend to, and `view` with their positions."""
        if self.keys is None or self.values is None:
            slots = self.first + self.size
            self.keys = k.new_zeros(*k.shape[:2], slots, k.shape[3])
            self.values = v.new_zeros(*v.shape[:2], slots, v.shape[3])
        if k.shape[2] > 1 or self.rows.real is not None:
            return self._append_many(self.keys, self.values, k, v, view)
        at = self.slot(self.rows.lengths)[:, None, None, None]
        for cache, new in ((self.keys, k), (self.values, v)):
            cache.scatter_(2, at.expand(-1, cache.shape[1], -1, cache.shape[3]), new)
        ring = view.lowered.get(("ring", self.first, self.size))  # the same in all layers with this pattern
        if ring is None:
            begin = self.rows.lengths[:, None]
            ring = self.view(view, self.positions(begin, begin + 1))
            view.lowered["ring", self.first, self.size] = ring
        return self.keys, self.values, ring

    def _append_many(
        self, keys: Tensor, values: Tensor, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T V"], view: View
    ) -> tuple[Tensor, Tensor, View]:
        """Store T tokens per row, of which the first `rows.real` are not padding. Return old keys before new keys."""
        T, slots, begin = k.shape[2], keys.shape[2], self.rows.lengths[:, None]
        all_keys, all_values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        last = begin + (T if self.rows.real is None else self.rows.real[:, None]) - 1
        newest = self.positions(last, torch.full_like(begin, -1))
        place = torch.where(newest >= begin, slots + newest - begin, torch.arange(slots, device=k.device))
        for cache, source in ((keys, all_keys), (values, all_values)):
            index = place[:, None, :, None].expand(-1, cache.shape[1], -1, cache.shape[3])
            cache.copy_(source.gather(2, index))
        if view.S == T:  # nothing was stored before
            return k, v, view
        old = self.positions(begin - 1, begin + T)
        return all_keys, all_values, self.view(view, torch.cat((old, self.rows.positions(T)), 1))

    def view(self, view: View, positions: Int[Tensor, "B S"]) -> View:
        """Return `view` for keys at these positions. Empty slots have positions that the causal mask hides."""
        queries, prefix = query_positions(view.mask, view.T, view.device), view.mask.prefix
        if prefix is not None:
            last = prefix.shape[1] - 1
            prefix = prefix.gather(1, positions.clamp(0, last)) & (positions <= last)
        mask = replace(
            view.mask, q_pos=queries, k_pos=positions, prefix=prefix, longest=view.S, columns=self.rows.reach(view.T)
        )
        return replace(view, mask=mask, S=positions.shape[1], lowered={}, shared={}, by_heads={})

    def slot(self, position: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """Return the slot in which the token at `position` is stored."""
        return torch.where(position < self.first, position, self.first + (position - self.first) % self.size)

    def positions(self, last: Int[Tensor, "B 1"], empty: Int[Tensor, "B 1"]) -> Int[Tensor, "B R"]:
        """Return the position of the token in each slot, or `empty` for empty slots. `last` is the newest position."""
        slot = torch.arange(self.first + self.size, device=last.device)
        newest = last - (last - slot) % self.size  # the largest position up to `last` in this slot of the ring
        at = torch.where(slot < self.first, slot, newest)
        stored = (at <= last) & ((slot < self.first) | (at >= self.first))
        return torch.where(stored, at, empty)

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        for cache in (self.keys, self.values):
            if cache is not None:  # in place, because a CUDA graph needs fixed addresses
                cache.copy_(cache.index_select(0, parent))

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Keep only the batch rows with the indices `rows`."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


Cache = KVCache | RingCache


def kv_cache(rows: Rows, view: View) -> Cache:
    """Return an empty cache for the pattern and position terms of `view`.

    The cache is a `RingCache` if the attention pattern needs fewer than `max_len` keys. Otherwise it is a `KVCache`,
    which stores keys in the order of positions. Position terms that depend on this order, such as Shaw's, always need a
    `KVCache`.
    """
    pattern, terms = view.mask.attention_pattern, view.terms or Terms()
    by_column = terms.bias is not None or terms.content is not None or terms.context is not None
    if pattern is None or pattern.reach is None or by_column or pattern.first + pattern.reach + 1 >= rows.max_len:
        return KVCache(rows)
    return RingCache(rows, pattern.first, pattern.reach + 1)
