"""The pairs of query and key tiles that a sparse attention kernel computes. No T x S mask is built to find them."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.fast.beam_cache import BeamMask
from regard.nn.mask import Mask, View
from regard.nn.pattern import LONGEST, AttentionPattern, Span, text_lengths

SLICE = 1024  # query tiles that are compared with all key tiles at a time, which bounds the memory


@dataclass(frozen=True, slots=True)
class Tiles:
    """Two masks over the pairs of a query tile and a key tile.

    `some` is True if any query of the query tile may attend to any key of the key tile. `every` is True if all its
    queries may attend to all these keys. If the batch axis has size 1, the masks hold for every batch row.
    """

    some: Bool[Tensor, "b Q K"]
    every: Bool[Tensor, "b Q K"]
    size: int  # number of tokens in a tile; the last tile of a row may be shorter


def tiles(view: View, size: int) -> Tiles:
    """Return which pairs of query and key tiles of `size` tokens are visible under the mask of `view`.

    Both masks are conservative: `some` may be True although no key is visible, and `every` may be False although all
    keys are visible.
    """
    rows = torch.arange(-(-view.T // size), device=view.device)
    pairs = [_pairs(view, size, some_rows) for some_rows in rows.split(SLICE)]
    some, every = pairs[0] if len(pairs) == 1 else (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
    return Tiles(some, every, size)


@lru_cache(maxsize=256)
def density(pattern: AttentionPattern, causal: bool, T: int, S: int) -> float:
    """Return the share of pairs of tiles that an attention pattern makes visible in one sequence without padding.

    The share is computed on the CPU, because reading a result from a GPU would mean waiting for the GPU. In a very
    long sequence, only some of the query tiles are counted.
    """
    view = View(Mask(causal=causal, start=S - T, attention_pattern=pattern), T, S, torch.device("cpu"))
    rows = torch.arange(-(-T // 64))
    return float(_pairs(view, 64, rows[:: -(-len(rows) // SLICE)])[0].float().mean())


def in_order(mask: Mask) -> bool:
    """Return whether the positions of a mask increase by 1 along each row, or along each text of a packed row."""
    if isinstance(mask, BeamMask):
        return False
    return mask.q_seg is mask.k_seg if mask.packed else mask.k_pos is None


def _pairs(view: View, size: int, rows: Int[Tensor, " q"]) -> tuple[Bool[Tensor, "#b q K"], Bool[Tensor, "#b q K"]]:
    """Return `some` and `every` of `Tiles` for the query tiles with the indices `rows`."""
    mask = view.mask
    q_pos, k_pos = mask.positions(view.T, view.S, view.device)
    pattern = mask.attention_pattern
    lengths = None
    if pattern is not None and pattern.reads_length:
        lengths = text_lengths(mask, view.S, view.device)
    if mask.packed:
        assert mask.q_seg is not None
        assert mask.k_seg is not None
        (q_least, q_most), (k_least, k_most) = _segments(mask.q_seg, size), _segments(mask.k_seg, size)
        shared = (k_least[:, None, :] <= q_most[:, rows, None]) & (q_least[:, rows, None] <= k_most[:, None, :])
        if in_order(mask):
            some = shared & _within_texts(view, size, rows, q_pos, k_pos, lengths)
        elif lengths is None:
            q, k = _span(q_pos, size, False, 2), _span(k_pos, size, False, 1)
            some = shared & _shown(mask, _at(q, rows), k, None, size)[0]
        else:
            some = shared  # lengths differ within a tile
        return some, torch.zeros_like(some)
    ordered = in_order(mask)
    q, k = _span(q_pos, size, ordered, 2), _span(k_pos, size, ordered, 1)
    some, every = _shown(mask, _at(q, rows), k, None if lengths is None else lengths[:, :, None], size)
    if mask.k_seg is not None and not mask.order_hides_padding():
        real = _tiled(mask.k_seg != 0, size, False)
        some, every = some & real.any(-1)[:, None, :], every & real.all(-1)[:, None, :]
    # The last tile of a row may be shorter, and is then not wholly visible.
    every = every & ((rows + 1) * size <= view.T)[:, None]
    every = every & ((torch.arange(k.first.shape[2], device=view.device) + 1) * size <= view.S)
    if isinstance(mask, BeamMask):
        every = torch.zeros_like(every)  # any tile may have slots of other beams, which are hidden
    return some, some & every


def _within_texts(
    view: View,
    size: int,
    rows: Int[Tensor, " q"],
    q_pos: Int[Tensor, "#b T"],
    k_pos: Int[Tensor, "#b S"],
    lengths: Int[Tensor, "#b T"] | None,
) -> Bool[Tensor, "#b q K"]:
    """Return `some` of `Tiles` for packed rows, in which texts follow each other.

    Two different tiles share at most one text: the first text of the later tile, which is the last text of the earlier
    tile. Only the tokens of this text are compared, because other texts would widen the range of positions in a tile.
    """
    mask = view.mask
    assert mask.q_seg is not None
    seg = _filled(mask.q_seg, size)
    first, last = seg == seg[:, :, :1], seg == seg[:, :, -1:]
    column = torch.arange(seg.shape[1], device=view.device)
    row = rows[:, None]
    some = column == row
    for q_text, k_text, at, pairs in ((first, last, 0, column < row), (last, first, -1, column > row)):
        length = None if lengths is None else _filled(lengths, size)[:, rows, at, None]
        q, k = _span(q_pos, size, True, 2, q_text), _span(k_pos, size, True, 1, k_text)
        some = some | (pairs & _shown(mask, _at(q, rows), k, length, size)[0])
    return some


def _shown(
    mask: Mask, q: Span, k: Span, length: Int[Tensor, "#b #q 1"] | None, size: int
) -> tuple[Bool[Tensor, "#b q K"], Bool[Tensor, "#b q K"]]:
    """Return `some` and `every` of `Tiles` under causality and the attention pattern alone, ignoring padding."""
    some = (q.first + k.first) == (q.first + k.first)
    every = some
    if mask.prefix is not None:
        k = k._replace(prefix=_tiled(mask.prefix, size, False).any(-1)[:, None, :])
    if mask.causal:
        earlier, before = k.first <= q.last, k.last <= q.first
        if mask.strict:
            earlier, before = k.first < q.last, k.last < q.first
        some, every = some & (earlier if k.prefix is None else earlier | k.prefix), every & before
    if mask.attention_pattern is not None:
        shown, wholly = mask.attention_pattern.tiles(q, k, length)
        some, every = some & shown, every & wholly
    return some, every


def _span(
    positions: Int[Tensor, "#b n"], size: int, ordered: bool, axis: int, of: Bool[Tensor, "#b N size"] | None = None
) -> Span:
    """Split `positions` into tiles, and return the spans of the tiles, with a new axis of size 1 at index `axis`.

    `ordered` is True if positions increase by 1. If `of` is given, only tokens at which it is True count.
    """
    tiled = _filled(positions, size)
    least = most = tiled
    if of is not None:
        least, most = tiled.masked_fill(~of, LONGEST), tiled.masked_fill(~of, -1)
    return Span(least.amin(-1).unsqueeze(axis), most.amax(-1).unsqueeze(axis), size if ordered else None)


def _at(q: Span, rows: Int[Tensor, " q"]) -> Span:
    """Return the spans of the query tiles with the indices `rows`."""
    return Span(q.first[:, rows], q.last[:, rows], q.size)


def _filled(values: Int[Tensor, "b n"], size: int) -> Int[Tensor, "b N size"]:
    """Split each row into tiles. The last tile of a row is filled with the last value of the row."""
    return torch.cat((values, values[:, -1:].expand(-1, -values.shape[1] % size)), 1).unflatten(1, (-1, size))


def _tiled(values: Bool[Tensor, "b n"], size: int, padding: bool) -> Bool[Tensor, "b N size"]:
    """Split each row into tiles. The last tile of a row is filled with `padding`."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % size), value=padding).unflatten(1, (-1, size))


def _segments(seg: Int[Tensor, "b n"], size: int) -> tuple[Int[Tensor, "b N"], Int[Tensor, "b N"]]:
    """Return the smallest and the largest segment number in each tile. A tile with only padding has an empty range."""
    tiled = torch.nn.functional.pad(seg, (0, -seg.shape[1] % size)).unflatten(1, (-1, size)).long()
    least = torch.where(tiled == 0, torch.iinfo(torch.int64).max, tiled).amin(-1)
    return least, torch.where(tiled == 0, -1, tiled).amax(-1)
