"""Sparse attention with torch's `scaled_dot_product_attention`: each query tile attends to its visible key tiles.

Time and memory grow with the number of visible tiles instead of T x S. Unlike FlexAttention, this kernel supports
attention dropout, and it supports gradients on a CPU.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.fast.flex import mask_mod
from regard.fast.tiles import Tiles, tiles
from regard.nn.attention import cached
from regard.nn.mask import View
from regard.nn.position.base import positions_of

SIZE = 64  # tokens in a tile
ELEMENTS = 2**24  # elements of a mask that are computed at a time


@dataclass(frozen=True, slots=True)
class Group:
    """A group of n query tiles with similar numbers of visible key tiles. The largest of these numbers is m."""

    queries: Int[Tensor, " n"]
    keys: Int[Tensor, "n m"]
    mask: Bool[Tensor, "n 1 c M"]  # M = m * c, where c is the number of tokens in a tile


def chunked_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    view: View,
    scale: float,
    dropout: float,
) -> Float[Tensor, "B H T V"]:
    """Return the attention output. There is one call of torch's kernel for each group of query tiles."""
    B, H, T, _ = q.shape
    groups = cached(view.shared, ("groups", B), lambda: groups_of(view, B))
    rows = visible_tiles(view).some.shape[0]  # 1 if all batch rows have the same tiles; rows are then treated as heads
    outer = B if rows == 1 else 1
    q_tiles, k_tiles, v_tiles = (_split(x, outer) for x in (q, k, v))
    outputs = []
    for group in groups:
        n, m = group.keys.shape
        mine = q_tiles[group.queries].flatten(1, 2)  # (n, outer * H, c, K)
        keys, values = (x[group.keys.flatten()].unflatten(0, (n, m)) for x in (k_tiles, v_tiles))
        keys, values = (x.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2) for x in (keys, values))
        bias = _bias(view, group, q.dtype)
        if bias is None:
            empty, mask = ~group.mask.any(-1, keepdim=True), group.mask
            mask = mask | empty
        else:
            empty = ~group.mask.any(-1, keepdim=True)
            mask = bias.masked_fill(~(group.mask | empty), -torch.inf).repeat(1, outer, 1, 1)
        y = F.scaled_dot_product_attention(
            mine, keys, values, mask, dropout_p=dropout, scale=scale, enable_gqa=mine.shape[1] != keys.shape[1]
        )
        outputs.append(y.masked_fill(empty, 0.0).unflatten(1, (outer, H)))
    order = cached(view.shared, ("order", B), lambda: torch.cat([group.queries for group in groups]).argsort())
    y = torch.cat(outputs)[order]  # (tiles, outer, H, c, V)
    if rows == 1:
        y = y.permute(1, 2, 0, 3, 4).flatten(2, 3)
    else:
        y = y[:, 0].unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)
    return y[:, :, :T]


def visible_tiles(view: View) -> Tiles:
    """Return the visible tiles of `view`. They are cached, so that the layers of a stack share them."""
    return cached(view.shared, ("tiles", SIZE), lambda: tiles(view, SIZE))


def groups_of(view: View, rows: int) -> list[Group]:
    """Return the groups of query tiles. The numbers of visible key tiles in a group differ by less than a factor of 2.

    If batch rows have different visible tiles, tile t of row b has index b * (number of tiles in a row) + t.
    """
    some = visible_tiles(view).some
    each = some.shape[0] > 1
    assert some.shape[0] in (1, rows)
    tile, key = some.flatten(0, 1).nonzero().unbind(1)  # the visible pairs, ordered by query tile
    counts = tile.new_zeros(some.shape[0] * some.shape[1]).scatter_add(0, tile, torch.ones_like(tile))
    begins = counts.cumsum(0) - counts
    widths = torch.where(counts > 0, 2 ** counts.clamp(min=1).log2().ceil(), 0).long()
    key = torch.cat((key, key.new_zeros(1)))  # the key tile that a query tile without visible keys reads
    groups = []
    for width in widths.unique().tolist():
        queries = (widths == width).nonzero()[:, 0]
        most = max(int(counts[queries].max()), 1)
        place = torch.arange(most, device=some.device)
        valid = place < counts[queries, None]
        keys = torch.where(valid, key[(begins[queries, None] + place).clamp(max=len(tile))], 0)
        row = (queries // some.shape[1] * some.shape[2])[:, None] if each else 0
        groups.append(Group(queries, keys + row, _mask(view, queries, keys, valid, each)))
    return groups


def _mask(
    view: View, queries: Int[Tensor, " n"], keys: Int[Tensor, "n m"], valid: Bool[Tensor, "n m"], each: bool
) -> Bool[Tensor, "n 1 c M"]:
    """Return the mask between the tokens of each query tile and the tokens of its key tiles.

    `valid` is False at unused entries of `keys`. `each` is True if batch rows have different visible tiles. The last
    tile of a row may extend beyond the end of the row. The mask is False there.
    """
    visible, tiles_of_row = mask_mod(view), -(-view.T // SIZE)
    inside = torch.arange(SIZE, device=queries.device)
    parts = max(1, ELEMENTS // (keys.shape[1] * SIZE * SIZE))  # query tiles at a time, which bounds the memory
    masks = []
    for tile, of, real in zip(queries.split(parts), keys.split(parts), valid.split(parts), strict=True):
        i = (tile % tiles_of_row)[:, None, None] * SIZE + inside[:, None]
        j = (of[:, :, None] * SIZE + inside).flatten(1)[:, None]
        row = (tile // tiles_of_row)[:, None, None] if each else torch.zeros_like(i[:, :1])
        shown = visible(row, None, i.clamp(max=view.T - 1), j.clamp(max=view.S - 1))
        masks.append(shown & (i < view.T) & (j < view.S) & real.repeat_interleave(SIZE, 1)[:, None])
    return torch.cat(masks)[:, None]


def _bias(view: View, group: Group, dtype: torch.dtype) -> Float[Tensor, "n H c M"] | None:
    """Return the bias that the position scheme adds to the scores of a group, or None if there is no bias."""
    terms = view.terms
    if terms is None or terms.by_distance is None:
        return None
    positions, tiles_of_row, tiles_of_keys = positions_of(view), -(-view.T // SIZE), -(-view.S // SIZE)
    inside = torch.arange(SIZE, device=view.device)
    i = ((group.queries % tiles_of_row)[:, None] * SIZE + inside).clamp(max=view.T - 1)
    j = ((group.keys % tiles_of_keys)[:, :, None] * SIZE + inside).flatten(1).clamp(max=view.S - 1)
    row = (group.queries // tiles_of_row)[:, None]
    q = positions.q[row if positions.q.shape[0] > 1 else 0, i]
    k = positions.k[row if positions.k.shape[0] > 1 else 0, j]
    return terms.by_distance(k[:, None, :] - q[:, :, None]).transpose(0, 1).to(dtype)


def _split(x: Float[Tensor, "B H T K"], outer: int) -> Float[Tensor, "n outer H c K"]:
    """Split the tokens into tiles of c tokens, stacked along a new first axis of n tiles.

    If `outer` is 1, the first axis has the tiles of all batch rows. Otherwise, `outer` is the batch size.
    """
    x = F.pad(x, (0, 0, 0, -x.shape[2] % SIZE)).unflatten(2, (-1, SIZE))  # (B, H, n, c, K)
    if outer == 1:
        return x.transpose(1, 2).flatten(0, 1)[:, None]
    return x.permute(2, 0, 1, 3, 4)
