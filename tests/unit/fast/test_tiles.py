from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard.fast import tiles as tile_module
from regard.fast.flex import block_mask_of
from regard.fast.tiles import density, tiles
from regard.nn.big_bird import BigBird, CausalBigBird
from regard.nn.mask import Mask, View
from regard.nn.pattern import AttentionPattern, Blocks, KeepPrefix, Sinks, Window

from .sparse_masks import T, masks

CPU = torch.device("cpu")
MASKS = dict(masks())


def by_tile(mask: Mask, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether some, and whether all pairs of tokens are visible in each pair of tiles, from the T x T mask."""
    dense = mask.dense(T, T, CPU)
    dense = torch.ones(1, 1, T, T, dtype=torch.bool) if dense is None else dense
    dense = dense[:, 0].expand(-1, T, T)
    padded = torch.nn.functional.pad(dense, (0, -T % size, 0, -T % size))
    pairs = padded.unflatten(2, (-1, size)).unflatten(1, (-1, size))  # (b, Q, c, K, c)
    return pairs.any(4).any(2), pairs.all(4).all(2)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_no_visible_pair_is_skipped_and_no_hidden_pair_is_taken_for_visible(name: str, size: int) -> None:
    mask = MASKS[name]
    found = tiles(View(mask, T, T, CPU), size)
    some, every = by_tile(mask, size)
    assert not (some & ~found.some).any()
    assert not (found.every & ~every).any()
    if found.some.shape[0] == 1:  # the same positions in all rows
        assert torch.equal(found.some.expand_as(some), some) or "padded" in name


@pytest.mark.parametrize("pattern", [Window(70), Blocks(64), Blocks(32, 1), Sinks(60, 3), CausalBigBird(32)])
def test_wholly_visible_tiles_are_found(pattern: AttentionPattern) -> None:
    mask = Mask(causal=True, attention_pattern=pattern)
    assert torch.equal(tiles(View(mask, 256, 256, CPU), 16).every[0], _every(mask, 256, 16))


def _every(mask: Mask, length: int, size: int) -> torch.Tensor:
    dense = mask.dense(length, length, CPU)
    assert dense is not None
    return dense[0, 0].unflatten(1, (-1, size)).unflatten(0, (-1, size)).all(3).all(1)


@pytest.mark.parametrize("name", ["window, packed, causal", "big bird, padded", "prefix kept, prefix, causal"])
def test_block_mask_lists_the_visible_tiles(name: str) -> None:
    view = View(MASKS[name], T, T, CPU)
    listed, visible = block_mask_of(view, 2), tiles(view, 128)
    assert torch.equal(listed.to_dense()[:, 0].bool(), visible.some.expand(2, -1, -1))
    assert listed.full_kv_num_blocks is not None
    assert torch.equal(listed.full_kv_num_blocks[:, 0], (visible.some & visible.every).sum(-1).expand(2, -1))


def test_visible_tiles_of_a_window_grow_with_the_length_alone() -> None:
    mask = Mask(causal=True, attention_pattern=Window(256))
    counts = [tiles(View(mask, n, n, CPU), 64).some.sum() for n in (2**12, 2**14)]
    assert counts[1] / counts[0] == pytest.approx(4, rel=0.05)
    assert density(Window(256), True, 2**14, 2**14) == pytest.approx(5 / 256, rel=0.02)


@pytest.mark.parametrize("name", [name for name in MASKS if "packed" in name])
def test_other_texts_of_a_packed_row_do_not_make_hidden_pairs_visible(name: str) -> None:
    some, _ = by_tile(MASKS[name], 16)
    extra = tiles(View(MASKS[name], T, T, CPU), 16).some & ~some
    extra.diagonal(dim1=1, dim2=2).zero_()  # a tile is always paired with itself
    assert not extra.any()


@pytest.mark.parametrize("name", [name for name in MASKS if "big bird" in name or "prefix kept" in name])
def test_tiles_do_not_depend_on_the_number_of_query_tiles_compared_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(MASKS[name], T, T, CPU)
    whole = tiles(view, 16)
    monkeypatch.setattr(tile_module, "SLICE", 3)
    parts = tiles(view, 16)
    assert torch.equal(parts.some, whole.some)
    assert torch.equal(parts.every, whole.every)


def test_a_prefix_is_skipped_where_it_ends() -> None:
    prefix = torch.arange(1024)[None] < 100
    mask = Mask(causal=True, prefix=prefix, attention_pattern=KeepPrefix(Window(64)))
    assert tiles(View(mask, 1024, 1024, CPU), 64).some.sum() == 2 * 16 + 15 - 1 + 13


class OnDevice(TorchDispatchMode):
    """Fails if a tensor is copied from the host to the device "meta", which stands for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.dim() for x in args), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pattern", [Window(64), BigBird(), CausalBigBird(), KeepPrefix(Window(64))], ids=repr)
def test_a_block_mask_is_built_without_waiting_for_the_device(pattern: AttentionPattern, packed: bool) -> None:
    """Copying a tensor from the host waits for the device, so that no step could be captured as a CUDA graph."""
    with torch.device("meta"):
        seg = torch.ones(2, 300, dtype=torch.int64)
        prefix = torch.ones(2, 300, dtype=torch.bool) if pattern.keeps_prefix else None
    options = {"packed": True, "q_seg": seg, "k_seg": seg, "q_pos": seg, "k_pos": seg} if packed else {}
    mask = Mask(causal=pattern.causal is not False, attention_pattern=pattern, prefix=prefix, **options)
    with OnDevice():
        block_mask_of(View(mask, 300, 300, torch.device("meta")), 2)
