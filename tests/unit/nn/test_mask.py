from collections.abc import Callable

import pytest
import torch

from regard.fast.attention import cumulative_lengths, is_causal_only, may_hide_all
from regard.fast.flex import mask_mod
from regard.nn.mask import Mask, View
from regard.nn.pattern import Window

CPU = torch.device("cpu")
SEG = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
PACKED = torch.tensor([[1, 1, 2, 2, 2], [1, 2, 3, 0, 0]])
WITHIN = torch.tensor([[0, 1, 0, 1, 2], [0, 0, 0, 0, 0]])
RAGGED = torch.tensor([[2, 3], [0, 1]])
PREFIX = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)


def test_dense_and_predicate_are_the_definition(
    case: tuple[Mask, int, int], is_visible: Callable[[Mask, int, int, int], bool]
) -> None:
    mask, T, S = case
    dense, predicate = mask.dense(T, S, CPU), mask_mod(View(mask, T, S, CPU))
    for b in range(2):
        for i in range(T):
            for j in range(S):
                expected = is_visible(mask, b, i, j)
                where = f"row {b}, query {i}, key {j}"
                if dense is None:
                    assert expected, where
                else:
                    row, query = (b if dense.shape[0] > 1 else 0), (i if dense.shape[2] > 1 else 0)
                    assert bool(dense[row, 0, query, j]) == expected, where
                actual = predicate(torch.tensor(b), torch.tensor(0), torch.tensor(i), torch.tensor(j))
                assert bool(actual) == expected, where


def test_right_padding_needs_no_tensor_under_a_causal_mask(is_visible: Callable[[Mask, int, int, int], bool]) -> None:
    mask = Mask(causal=True, q_seg=SEG, k_seg=SEG)
    assert is_causal_only(View(mask, 5, 5, CPU))
    for b in range(2):
        for i in range(5):
            if SEG[b, i]:  # for a real query, causality alone equals the definition
                assert [is_visible(mask, b, i, j) for j in range(5)] == [j <= i for j in range(5)]


@pytest.mark.parametrize(
    ("mask", "T", "S", "expected"),
    [
        (Mask(causal=True), 5, 5, True),
        (Mask(causal=True, k_seg=SEG), 5, 5, True),
        (Mask(), 5, 5, False),
        (Mask(causal=True), 1, 5, False),
        (Mask(causal=True, start=2), 5, 5, False),
        (Mask(causal=True, strict=True), 5, 5, False),
        (Mask(causal=True, q_pos=WITHIN), 5, 5, False),
        (Mask(causal=True, k_pos=WITHIN), 5, 5, False),
        (Mask(causal=True, packed=True), 5, 5, False),
        (Mask(causal=True, prefix=PREFIX), 5, 5, False),
        (Mask(causal=True, attention_pattern=Window(9)), 5, 5, False),
    ],
)
def test_masks_that_are_the_lower_triangle(mask: Mask, T: int, S: int, expected: bool) -> None:
    assert is_causal_only(View(mask, T, S, CPU)) is expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Mask(), True),
        (Mask(q_seg=SEG), True),  # the outputs of padded queries do not matter
        (Mask(k_seg=SEG), False),
        (Mask(causal=True), False),
        (Mask(causal=True, start=4), True),
        (Mask(causal=True, start=3), False),
        (Mask(causal=True, strict=True, start=4), False),
        (Mask(causal=True, q_pos=RAGGED), False),
        (Mask(packed=True, q_seg=SEG, k_seg=SEG), False),
        (Mask(attention_pattern=Window(3)), False),
    ],
)
def test_a_mask_that_hides_nothing_needs_no_tensor(mask: Mask, expected: bool) -> None:
    assert (mask.dense(1, 5, CPU) is None) is expected


def lengths_of(seg: list[list[int]], segments: int) -> list[int]:
    """Return the cumulative lengths of segments 1 .. `segments` and of the padding of each row."""
    ends = [0]
    for row in seg:
        for number in (*range(1, segments + 1), 0):
            ends.append(ends[-1] + row.count(number))
    return ends


@pytest.mark.parametrize("segments", [3, 5])
def test_cumulative_lengths_of_packed_rows(segments: int) -> None:
    mask = Mask(causal=True, q_seg=PACKED, k_seg=SEG, packed=True, segments=segments)
    q_ends, k_ends = cumulative_lengths(mask, 5, 5, 2, CPU)
    assert q_ends.tolist() == lengths_of(PACKED.tolist(), segments)
    assert k_ends.tolist() == lengths_of(SEG.tolist(), segments)
    assert q_ends.dtype == k_ends.dtype == torch.int32


def test_lengths_never_exceed_the_longest() -> None:
    seg = torch.tensor([[1, 1, 2] + [0] * 5, [1] + [0] * 7])
    ends = cumulative_lengths(Mask(q_seg=seg, k_seg=seg, packed=True, segments=2, longest=3), 8, 8, 2, CPU)[0]
    lengths = ends.diff().tolist()
    assert lengths == [2, 1, 3, 2, 0, 1, 0, 3, 3, 1]
    assert sum(lengths) == 16


def test_lengths_without_segments_are_whole_rows() -> None:
    q_ends, k_ends = cumulative_lengths(Mask(), 2, 3, 4, CPU)
    assert q_ends.tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 8]  # one segment, and no padding
    assert k_ends.tolist() == [0, 3, 3, 6, 6, 9, 9, 12, 12]


def test_may_hide_all_detects_queries_without_keys(
    case: tuple[Mask, int, int], is_visible: Callable[[Mask, int, int, int], bool]
) -> None:
    mask, T, S = case
    empty = [(b, i) for b in range(2) for i in range(T) if not any(is_visible(mask, b, i, j) for j in range(S))]
    assert may_hide_all(mask) or not empty
    if not (mask.packed or mask.strict or mask.attention_pattern):
        assert not may_hide_all(mask)  # no query is empty, so no kernel needs the slower code


def test_positions_start_at_the_start_of_the_mask() -> None:
    q, k = Mask(start=3).positions(2, 5, CPU)
    assert (q.tolist(), k.tolist()) == ([[3, 4]], [[0, 1, 2, 3, 4]])
    q, k = Mask(q_pos=RAGGED, start=7).positions(2, 5, CPU)
    assert (q.tolist(), k.tolist()) == (RAGGED.tolist(), [[0, 1, 2, 3, 4]])


def test_bound_is_above_every_position() -> None:
    assert Mask().bound(5) == 5
    assert Mask(packed=True, q_pos=WITHIN, k_pos=WITHIN, longest=3).bound(5) == 3
    assert Mask(packed=True, longest=3).bound(5) == 5  # positions count along the whole row
    assert Mask(packed=True, q_pos=WITHIN, k_pos=WITHIN).bound(5) == 5
