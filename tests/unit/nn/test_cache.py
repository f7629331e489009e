from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from regard.errors import SpecError
from regard.nn.cache import KVCache, RecurrentState, Rows, StaticKV


def rows_of(B: int, max_len: int, mode: str) -> Rows:
    """Return rows for `mode`. In a `ragged` session, rows may have different lengths, but here all are equal."""
    return Rows(torch.zeros(B, dtype=torch.int64), max_len, uniform=mode == "uniform", static=mode == "static")


def visible_keys(rows: Rows, cache: KVCache, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Append keys and values, advance, and return those visible to the last new token of each row."""
    T = k.shape[2]
    keys, values, _ = cache.append(k, v, rows.view(T))
    S = rows.reach(T)
    assert keys.shape[2] == values.shape[2] == S
    dense = rows.mask(T).dense(T, S, k.device)
    pairs = []
    for b in range(k.shape[0]):
        visible = torch.ones(S, dtype=torch.bool) if dense is None else dense[min(b, len(dense) - 1), 0, -1]
        pairs.append((keys[b, :, visible], values[b, :, visible]))
    rows.advance(T, None)
    return pairs


@pytest.mark.parametrize("mode", ["uniform", "ragged", "static"])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1), (3, 1), (2, 2), (4,)])
def test_appends_keep_every_key_in_its_order(mode: str, steps: Sequence[int]) -> None:
    k, v = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 6)
    rows = rows_of(2, 7, mode)
    cache, at = KVCache(rows), 0
    for T in steps:
        pairs = visible_keys(rows, cache, k[:, :, at : at + T], v[:, :, at : at + T])
        at += T
        for b, (keys, values) in enumerate(pairs):
            assert torch.equal(keys, k[b, :, :at])
            assert torch.equal(values, v[b, :, :at])
    assert rows.lengths.tolist() == [4, 4]
    assert rows.bound == 4


@pytest.mark.parametrize("static", [False, True])
def test_rows_of_unequal_length_continue_at_their_own_ends(static: bool) -> None:
    """Prompts of 3 and 1 tokens, padded to 3; then one token each, twice."""
    rows = Rows(torch.zeros(2, dtype=torch.int64), 6, uniform=not static, static=static)
    cache, counts = KVCache(rows), torch.tensor([3, 1])
    prompt, steps = torch.randn(2, 1, 3, 2), [torch.randn(2, 1, 1, 2) for _ in range(2)]
    cache.append(prompt, prompt, rows.view(3))
    rows.advance(3, counts)
    assert not rows.uniform
    expected = [list(prompt[b, 0, : counts[b]]) for b in range(2)]
    for step in steps:
        S = rows.reach(1)
        keys, _, _ = cache.append(step, step, rows.view(1))
        dense = rows.mask(1).dense(1, S, keys.device)
        assert dense is not None
        for b in range(2):
            expected[b].append(step[b, 0, 0])
            assert torch.equal(keys[b, 0, dense[b, 0, 0]], torch.stack(expected[b]))
        rows.advance(1, None)
    assert rows.lengths.tolist() == [5, 3]
    assert rows.bound == 5


@pytest.mark.parametrize("mode", ["uniform", "ragged", "static"])
def test_reorder_makes_a_row_continue_another(mode: str) -> None:
    rows = rows_of(3, 5, mode)
    cache, k = KVCache(rows), torch.randn(3, 2, 3, 4)
    cache.reorder(torch.tensor([1, 1, 0]))  # nothing read yet
    cache.append(k[:, :, :2], k[:, :, :2], rows.view(2))
    rows.advance(2, None)
    parent = torch.tensor([2, 0, 0])
    assert cache.keys is not None
    address = cache.keys.data_ptr()
    cache.reorder(parent)
    rows.reorder(parent)
    pairs = visible_keys(rows, cache, k[:, :, 2:], k[:, :, 2:])
    for b in range(3):
        assert torch.equal(pairs[b][0], torch.cat((k[parent[b], :, :2], k[b, :, 2:]), 1))
    assert cache.keys.data_ptr() == address  # in place: a captured graph keeps its addresses


def test_reorder_carries_lengths() -> None:
    rows = Rows(torch.tensor([4, 1, 2]), 9, bound=4, uniform=False)
    lengths = rows.lengths
    rows.reorder(torch.tensor([1, 1, 2]))
    assert rows.lengths.tolist() == [1, 1, 2]
    assert rows.lengths is lengths


def test_beams_share_the_memory_and_reorder_keeps_it() -> None:
    keys, values = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    state = StaticKV(keys, values)
    state.reorder(torch.tensor([0, 0, 1]))
    assert state.keys is keys
    assert state.values is values


@pytest.mark.parametrize("mode", ["uniform", "ragged", "static"])
def test_too_many_steps_are_refused_before_they_are_written(mode: str) -> None:
    rows = rows_of(2, 4, mode)
    for T in (3, 1):
        rows.claim(T)
        rows.advance(T, None)
    with pytest.raises(SpecError, match=r"^max_len: 4 \+ 1 tokens are more than this session's maximum of 4"):
        rows.claim(1)


def test_reach_is_the_number_of_keys_or_the_maximum_if_static() -> None:
    assert rows_of(1, 9, "uniform").reach(2) == 2
    assert rows_of(1, 9, "static").reach(2) == 9
    assert Rows(torch.tensor([3, 1]), 9, bound=3, uniform=False).reach(2) == 5


def test_masks_of_decoding_steps_by_definition() -> None:
    """Query t of row b is at lengths[b] + t and attends to the keys up to itself, and to the prefix."""
    lengths, prefix = [3, 1], [4, 2]
    for uniform, static in ((False, False), (False, True)):
        rows = Rows(torch.tensor(lengths), 8, bound=3, uniform=uniform, static=static)
        S = rows.reach(2)
        dense = rows.mask(2, torch.tensor(prefix)).dense(2, S, rows.lengths.device)
        assert dense is not None
        for b in range(2):
            for t in range(2):
                assert dense[b, 0, t].tolist() == [j <= lengths[b] + t or j < prefix[b] for j in range(S)]


def test_a_uniform_step_needs_no_tensor() -> None:
    rows = Rows(torch.tensor([3, 3]), 8, bound=3)
    mask = rows.mask(1)
    assert mask.dense(1, rows.reach(1), rows.lengths.device) is None
    assert (mask.start, mask.q_pos) == (3, None)


def test_recurrent_states_have_parts_of_any_shape() -> None:
    """Rows whose new tokens are all padding keep their state; whole sources are kept, replaced and reordered."""
    rows = Rows.start(2, 2, torch.device("cpu"), 9, static=False)
    old, new, other = ((torch.randn(4, 3), torch.randn(4, 2, 5, 3), torch.randn(4)) for _ in range(3))
    state = RecurrentState(rows, old)
    rows.claim(2, torch.tensor([2, 0, 1, 0]))
    state.write(new)
    expected = [torch.stack((b[0], a[1], b[2], a[3])) for a, b in zip(old, new, strict=True)]
    assert all(map(torch.equal, state.parts, expected))
    state.reorder(torch.tensor([1, 1, 3, 2]))
    expected = [part[[1, 1, 3, 2]] for part in expected]
    assert all(map(torch.equal, state.parts, expected))
    state.put(RecurrentState(rows, other), torch.tensor([1]), torch.tensor([0]))
    expected = [torch.cat((part[2:], own[2:])) for part, own in zip(other, expected, strict=True)]
    assert all(map(torch.equal, state.parts, expected))
    state.keep(torch.tensor([2, 3]), torch.tensor([1]))
    assert all(map(torch.equal, state.parts, [part[2:] for part in expected]))
