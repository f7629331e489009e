"""The pairs of query and key tiles that a sparse attention kernel computes. No T x S mask is built to find them."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.fast.beam_cache import BeamMask
from regard.nn.mask import Mask, View
from regard.nn.pattern import AttentionPattern, Span, text_lengths


@dataclass(frozen=True, slots=True)
class Tiles:
    """Two masks over the pairs of a query tile and a key tile.

    `some` is True if any query of the pair may attend to any of its keys. `every` is True if all queries attend to all
    keys. If the batch axis has size 1, the masks hold for every batch row.
    """

    some: Bool[Tensor, "b Q K"]
    every: Bool[Tensor, "b Q K"]
    size: int  # number of tokens in a tile; the last tile of a row may be shorter


def tiles(view: View, size: int) -> Tiles:
    """Return `Tiles`: which pairs of tiles of `size` tokens the mask of `view` makes visible.

    Both masks are conservative: `some` may be True although no key is visible, and `every` may be False although all
    keys are visible.
    """
    mask = view.mask
    q_pos, k_pos = mask.positions(view.T, view.S, view.device)
    q, k = _spans(q_pos, size, mask.q_pos is None)[0], _spans(k_pos, size, mask.k_pos is None)[1]
    some = (q.first + k.first) == (q.first + k.first)
    every = some
    if mask.causal:
        earlier, before = k.first <= q.last, k.last <= q.first
        if mask.strict:
            earlier, before = k.first < q.last, k.last < q.first
        if mask.prefix is not None:
            earlier = earlier | _tiled(mask.prefix, size, False).any(-1)[:, None, :]
        some, every = some & earlier, every & before
    pattern = mask.attention_pattern
    if pattern is not None:
        if pattern.reads_length and mask.packed:
            every = torch.zeros_like(every)  # lengths differ within a tile
        else:
            length = text_lengths(mask, view.S, view.device)[:, :, None] if pattern.reads_length else None
            shown, wholly = pattern.tiles(q, k, length)
            some, every = some & shown, every & wholly
    if mask.packed:
        assert mask.q_seg is not None
        assert mask.k_seg is not None
        (q_least, q_most), (k_least, k_most) = _segments(mask.q_seg, size), _segments(mask.k_seg, size)
        shared = (k_least[:, None, :] <= q_most[:, :, None]) & (q_least[:, :, None] <= k_most[:, None, :])
        some, every = some & shared, torch.zeros_like(every)
    elif mask.k_seg is not None and not mask.order_hides_padding():
        real = _tiled(mask.k_seg != 0, size, False)
        some, every = some & real.any(-1)[:, None, :], every & real.all(-1)[:, None, :]
    # Computed on the device of the mask: the host would wait for a copy, which a CUDA graph cannot capture.
    whole_q, whole_k = (torch.arange(size, n + size, size, device=view.device) <= n for n in (view.T, view.S))
    every = every & whole_q[None, :, None] & whole_k[None, None, :]
    if isinstance(mask, BeamMask):
        every = torch.zeros_like(every)  # other beams hide keys in any tile
    return Tiles(some, some & every, size)


@lru_cache(maxsize=256)
def density(pattern: AttentionPattern, causal: bool, T: int, S: int) -> float:
    """Return the share of pairs of tiles that an attention pattern makes visible in one sequence without padding.

    The share is computed on the CPU, because reading a result from a GPU would mean waiting for the GPU.
    """
    mask = Mask(causal=causal, start=S - T, attention_pattern=pattern)
    return float(tiles(View(mask, T, S, torch.device("cpu")), 64).some.float().mean())


def _spans(positions: Int[Tensor, "b n"], size: int, regular: bool) -> tuple[Span, Span]:
    """Return the spans of the tiles of `positions`, along the second axis for queries and along the third for keys."""
    tiled = torch.cat((positions, positions[:, -1:].expand(-1, -positions.shape[1] % size)), 1).unflatten(1, (-1, size))
    first, last = tiled.amin(-1), tiled.amax(-1)
    known = size if regular else None
    return Span(first[:, :, None], last[:, :, None], known), Span(first[:, None, :], last[:, None, :], known)


def _tiled(values: Bool[Tensor, "b n"], size: int, padding: bool) -> Bool[Tensor, "b N size"]:
    """Split each row into tiles. The last tile of a row is filled with `padding`."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % size), value=padding).unflatten(1, (-1, size))


def _segments(seg: Int[Tensor, "b n"], size: int) -> tuple[Int[Tensor, "b N"], Int[Tensor, "b N"]]:
    """Return the smallest and the largest segment number in each tile. A tile with only padding has an empty range."""
    tiled = torch.nn.functional.pad(seg, (0, -seg.shape[1] % size)).unflatten(1, (-1, size)).long()
    least = torch.where(tiled == 0, torch.iinfo(torch.int64).max, tiled).amin(-1)
    return least, torch.where(tiled == 0, -1, tiled).amax(-1)
