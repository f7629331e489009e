"""Random masks match their definition."""

from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.fast import attention as kernels
from regard.fast.attention import cumulative_lengths, is_causal_only
from regard.fast.flex import mask_mod
from regard.nn.mask import Mask, View
from regard.nn.pattern import Window

CPU = torch.device("cpu")


@st.composite
def segments(draw: st.DrawFn, rows: int, width: int, packed: bool) -> Tensor:
    """Rows of 1 .. n numbered along the row (only 1 unless packed), then padding."""
    segment_rows = []
    for _ in range(rows):
        numbers = sorted(draw(st.lists(st.integers(1, 3 if packed else 1), max_size=width)))
        segment_rows.append(numbers + [0] * (width - len(numbers)))
    return torch.tensor(segment_rows, dtype=torch.int64).reshape(rows, width)


def integers(draw: st.DrawFn, rows: int, width: int, high: int) -> Tensor:
    drawn = draw(st.lists(st.integers(0, high), min_size=rows * width, max_size=rows * width))
    return torch.tensor(drawn).reshape(rows, width)


@st.composite
def masks(draw: st.DrawFn) -> tuple[Mask, int, int, int]:
    """(mask, rows, T, S) with random fields. An unpacked causal mask has no padding, which it would not mask."""
    rows, T, S = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    causal, packed = draw(st.booleans()), draw(st.booleans())
    fields: dict[str, Any] = {"causal": causal, "packed": packed, "segments": 3 if packed else 1}
    fields["strict"] = draw(st.booleans())
    fields["start"] = draw(st.integers(0, 5))
    if draw(st.booleans()):
        fields["q_pos"] = integers(draw, draw(st.sampled_from([1, rows])), T, 7)
    if draw(st.booleans()):
        fields["k_pos"] = integers(draw, draw(st.sampled_from([1, rows])), S, 7)
    # An unpacked causal mask does not mask padded keys: they are in the future of all other tokens.
    if packed or (not causal and draw(st.booleans())):
        fields["q_seg"], fields["k_seg"] = draw(segments(rows, T, packed)), draw(segments(rows, S, packed))
    if draw(st.booleans()):
        fields["prefix"] = integers(draw, rows, S, 1).bool()
    if draw(st.booleans()):
        fields["attention_pattern"] = Window(draw(st.integers(1, 5)))
    return Mask(**fields), rows, T, S


def defined(mask: Mask, b: int, i: int, j: int) -> bool:
    """seg_i == seg_j != 0 and (not causal or prefix_j or pos_j <= pos_i, < when strict) and pattern(pos_i, pos_j)."""

    def at(tensor: Tensor | None, n: int, otherwise: int) -> int:
        return otherwise if tensor is None else int(tensor[b if len(tensor) > 1 else 0, n])

    q, k = at(mask.q_pos, i, mask.start + i), at(mask.k_pos, j, j)
    same = at(mask.k_seg, j, 1) != 0 and (not mask.packed or at(mask.q_seg, i, 1) == at(mask.k_seg, j, 1))
    past = not mask.causal or at(mask.prefix, j, 0) == 1 or k < q or (k == q and not mask.strict)
    near = mask.attention_pattern is None or abs(q - k) < mask.attention_pattern.size  # type: ignore[reportAttributeAccessIssue]  # a Window
    return same and past and near


def definition(mask: Mask, rows: int, T: int, S: int) -> Tensor:
    return torch.tensor([[[[defined(mask, b, i, j) for j in range(S)] for i in range(T)]] for b in range(rows)])


@settings(max_examples=150)
@given(masks())
def test_dense_mask_matches_the_definition(case: tuple[Mask, int, int, int]) -> None:
    mask, rows, T, S = case
    dense = mask.dense(T, S, CPU)
    expected = definition(mask, rows, T, S)
    if dense is None:
        assert bool(expected.all())
    else:
        assert torch.equal(dense.expand(rows, 1, T, S), expected)


@settings(max_examples=60)
@given(masks())
def test_mask_predicate_matches_the_dense_mask(case: tuple[Mask, int, int, int]) -> None:
    mask, rows, T, S = case
    predicate, expected = mask_mod(View(mask, T, S, CPU)), definition(mask, rows, T, S)
    b, i, j = torch.meshgrid(torch.arange(rows), torch.arange(T), torch.arange(S), indexing="ij")
    assert torch.equal(predicate(b, torch.tensor(0), i, j).expand(rows, T, S), expected[:, 0])


@settings(max_examples=60)
@given(masks())
@example((Mask(causal=True), 2, 5, 5))  # of all that is drawn, hardly any is plain
@example((Mask(causal=True, start=4), 2, 1, 5))
def test_mask_shortcuts_match_the_definition(case: tuple[Mask, int, int, int]) -> None:
    mask, rows, T, S = case
    expected = definition(mask, rows, T, S)
    if is_causal_only(View(mask, T, S, CPU)):
        assert torch.equal(expected, torch.ones(T, S, dtype=torch.bool).tril().expand_as(expected))
    if mask.dense(T, S, CPU) is None:
        assert bool(expected.all())


@settings(max_examples=60)
@given(masks(), st.integers(0, 2**32))
def test_sdpa_and_reference_agree_on_any_mask(case: tuple[Mask, int, int, int], seed: int) -> None:
    mask, rows, T, S = case
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, 2, n, w, generator=rng) for n, w in ((T, 3), (S, 3), (S, 2)))
    visible = definition(mask, rows, T, S)
    scores = (0.5 * q @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    for name in ("sdpa", "reference"):
        with kernels.use(name):
            y = kernels.attend(q, k, v, View(mask, T, S, CPU), scale=0.5)
        torch.testing.assert_close(y, scores @ v, rtol=0, atol=1e-12)


@settings(max_examples=60)
@given(st.data())
def test_segment_lengths_are_token_counts(data: st.DataObject) -> None:
    rows, T, S, most = (data.draw(st.integers(1, 4)) for _ in range(4))
    most = max(most, 3)
    q_seg, k_seg = data.draw(segments(rows, T, True)), data.draw(segments(rows, S, True))
    ends = cumulative_lengths(Mask(q_seg=q_seg, k_seg=k_seg, packed=True, segments=most), T, S, rows, CPU)
    for seg, actual in zip((q_seg, k_seg), ends, strict=True):
        expected = [0]
        for row in seg.tolist():
            for number in (*range(1, most + 1), 0):
                expected.append(expected[-1] + row.count(number))
        assert actual.tolist() == expected
        assert actual[-1] == seg.numel()
