"""The ring of a causal convolution against the whole past, however it is read."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from regard.nn.causal_convolution import Taps, receptive_field, windows
from regard.nn.mask import Mask, View
from regard.nn.state import ConvolutionCache, Rows

B, D = 3, 2
Advance = Callable[[Tensor, Tensor | None], Tensor]


def naive(text: Tensor, t: int, taps: int, step: int) -> Tensor:
    """What the taps of place t read of a text (T, D): zeros before its beginning."""
    places = [t - (taps - 1 - i) * step for i in range(taps)]
    return torch.cat([text[p] if p >= 0 else torch.zeros(D) for p in places])


def reader(taps: int, step: int, static: bool, rows: int = B) -> tuple[Rows, ConvolutionCache, Advance]:
    state = Rows(torch.zeros(rows, dtype=torch.int64), max_len=64, uniform=not static, static=static)
    ring = ConvolutionCache(state, (taps - 1) * step, step)

    def advance(x: Tensor, counts: Tensor | None) -> Tensor:
        seen = ring.read(x, counts)
        state.advance(x.shape[1], counts)
        return seen

    return state, ring, advance


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("taps", "step"), [(2, 1), (3, 1), (3, 2), (2, 5), (4, 3)])
@pytest.mark.parametrize("pieces", [[1] * 14, [5, 1, 1, 7], [14], [2, 2, 1, 9]])
def test_it_reads_what_the_taps_read(taps: int, step: int, pieces: list[int], static: bool) -> None:
    text = torch.randn(B, 14, D)
    _, ring, advance = reader(taps, step, static)
    seen = torch.cat([advance(x, None) for x in text.split(pieces, 1)], 1)
    expected = [[naive(text[b], t, taps, step) for t in range(14)] for b in range(B)]
    assert torch.equal(seen, torch.stack([torch.stack(row) for row in expected]))
    assert ring.x is not None
    assert ring.x.shape == (B, (taps - 1) * step, D)  # however long the text


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("taps", "step"), [(3, 1), (3, 2), (2, 4)])
def test_rows_may_stand_at_different_lengths(taps: int, step: int, static: bool) -> None:
    """What is no token must not take the place of one that is still to be read."""
    steps = [[3, 1, 7], [2, 6, 1], [1, 1, 1], [1, 4, 2], [1, 1, 1], [1, 1, 1]]
    texts = [torch.randn(sum(counts), D) for counts in zip(*steps, strict=True)]
    begins = [[0, *accumulate(counts)] for counts in zip(*steps, strict=True)]
    _, _, advance = reader(taps, step, static)
    for n, counts in enumerate(steps):
        x = torch.full((B, max(counts), D), torch.nan)
        for b, count in enumerate(counts):
            x[b, :count] = texts[b][begins[b][n] : begins[b][n] + count]
        seen = advance(x, None if set(counts) == {1} and n % 2 else torch.tensor(counts))
        for b, count in enumerate(counts):
            expected = [naive(texts[b], begins[b][n] + t, taps, step) for t in range(count)]
            assert torch.equal(seen[b, :count], torch.stack(expected)), (n, b)


def test_rows_are_reordered_and_forgotten_and_begin_anew() -> None:
    text = torch.randn(B, 6, D)
    for static in (False, True):
        state, ring, advance = reader(3, 2, static)
        for x in text[:, :5].split(1, 1):
            advance(x, None)
        assert ring.x is not None
        place, parent = ring.x.data_ptr(), torch.tensor([2, 0, 0])
        ring.reorder(parent)
        state.reorder(parent)
        assert ring.x.data_ptr() == place  # a captured step reads the same memory
        seen = advance(text[:, 5:], None)
        for b, came in enumerate(parent.tolist()):
            mine = torch.cat((text[came, :5], text[b, 5:]))
            assert torch.equal(seen[b, 0], naive(mine, 5, 3, 2))
    state.restart(torch.tensor([1]))
    seen = advance(text[:, :1], None)
    assert torch.equal(seen[1, 0], naive(text[1], 0, 3, 2)), "what another text left is not read"
    state, ring, advance = reader(2, 1, static=False)
    advance(text[:, :2], None)
    ring.keep(torch.tensor([2, 1]), torch.tensor([2, 1]))
    state.keep(torch.tensor([2, 1]))
    seen = advance(text[[2, 1], 2:3], None)
    assert torch.equal(seen[:, 0], torch.stack([naive(text[b], 2, 2, 1) for b in (2, 1)]))


@pytest.mark.parametrize("taps", [Taps(2, 0), Taps(4, 0, 2), Taps(1, 1), Taps(3, 3, 3), Taps(1, 2), Taps(0, 0)])
def test_windows_read_nothing_beyond_a_row_and_its_segment(taps: Taps) -> None:
    x = torch.randn(2, 7, D)
    for packed, rows in ((False, [[1] * 5 + [0] * 2, [1] * 7]), (True, [[1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 2, 3, 3]])):
        seg = torch.tensor(rows)
        view = View(Mask(q_seg=seg, k_seg=seg, packed=packed, segments=3), 7, 7, x.device)
        seen = windows(x, taps, view)
        for b in range(2):
            for t in range(7):
                if seg[b, t]:
                    places = [t - taps.before + i for i in taps.places()]
                    there = [0 <= p < 7 and bool(seg[b, p] == seg[b, t]) for p in places]
                    expected = [x[b, p] if yes else torch.zeros(D) for p, yes in zip(places, there, strict=True)]
                    assert torch.equal(seen[b, t], torch.cat(expected))


def test_the_receptive_field_of_layers() -> None:
    assert receptive_field([]) == 1
    assert receptive_field([(3, 1)] * 5) == 1 + 5 * (3 - 1)
    assert receptive_field([(3, d) for d in (1, 2, 4, 8, 16)] * 6) == 1 + 2 * 6 * 31
