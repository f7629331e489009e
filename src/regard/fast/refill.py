"""Continuous batching: finished sources in a static decoding session are replaced by new sources, in place.

All tensors keep their addresses, so that a step captured as a CUDA graph continues with the new sources.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from regard.fast.attention import additive, forced
from regard.models.decoding import Decoding, flat
from regard.nn.attention import visible
from regard.nn.cache import Refillable
from regard.nn.mask import View


def refillable(decodings: Sequence[Decoding]) -> bool:
    """Return whether `refill` is possible.

    It requires static shapes, cached states that can be refilled, and attention masks that are plain tensors.
    """
    states = (state for decoding in decodings for state in flat(decoding.states))
    static = all(decoding.rows.static for decoding in decodings)
    return static and forced() in (None, "sdpa", "reference") and all(isinstance(s, Refillable) for s in states)


def refill(decoding: Decoding, fresh: Decoding, of: Int[Tensor, " n"], at: Int[Tensor, " n"]) -> None:
    """Replace source `at[i]` of `decoding` by source `of[i]` of `fresh` in place, for each i.

    `fresh` is a new decoding session of the same shape.
    """
    for state, its in zip(flat(decoding.states), flat(fresh.states), strict=True):
        state.put(its, of, at)
    decoding.rows.restart((at[:, None] * decoding.beams + torch.arange(decoding.beams, device=at.device)).flatten())
    for mine, its in zip(_tensors_of_sources(decoding), _tensors_of_sources(fresh), strict=True):
        mine.index_copy_(0, at, its.index_select(0, of))
    if decoding.cross is not None:
        _recompute_cached(decoding.cross)


def _tensors_of_sources(decoding: Decoding) -> list[Tensor]:
    """Return the tensors of a decoding session that have one row per source and do not change between steps."""
    memory = () if decoding.memory is None else (*decoding.memory.x, decoding.memory.seg)
    mask = () if decoding.cross is None else (decoding.cross.mask.k_seg,)
    # The mask and the memory may share one segment tensor.
    return list({id(tensor): tensor for tensor in (*memory, *mask) if tensor is not None}.values())


def _recompute_cached(view: View) -> None:
    """After the mask of a view has changed, recompute the cached tensors that depend on the mask, in place."""
    fresh = replace(view, lowered={}, shared={})
    for cache in (view.shared, view.lowered):
        for key, old in cache.items():
            if old is not None:
                old.copy_(visible(fresh) if key == "dense" else additive(fresh, key[1]))
