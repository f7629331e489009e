from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.fast.flex import block_mask_of
from regard.fast.tiles import density, tiles
from regard.nn.big_bird import CausalBigBird
from regard.nn.mask import Mask, View
from regard.nn.pattern import AttentionPattern, Blocks, Sinks, Window

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


class HostTensors(TorchDispatchMode):
    """Records the operations that read or return a tensor on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        self.found += [str(func) for x in tensors if x.device.type == "cpu"]
        return result


@pytest.mark.parametrize("name", MASKS)
def test_block_masks_are_built_on_the_device_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from the host would make it wait, and a CUDA graph cannot capture a copy."""
    mask, device = MASKS[name], torch.device("meta")
    tensors = {field.name: getattr(mask, field.name) for field in fields(mask)}
    moved = {field: x.to(device) for field, x in tensors.items() if isinstance(x, torch.Tensor)}

    def from_the_host(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.tensor copies from the host")

    monkeypatch.setattr(torch, "tensor", from_the_host)
    with HostTensors() as host:
        block_mask_of(View(replace(mask, **moved), T, T, device), 2)
    assert not host.found
