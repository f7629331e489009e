"""The cache buffer of a causal convolution, compared with the whole sequence, for any step sizes."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from regard.nn.cache import ConvolutionCache, Rows
from regard.nn.causal_convolution import KernelExtent, receptive_field, unfold
from regard.nn.mask import Mask, View

B, D = 3, 2
Advance = Callable[[Tensor, Tensor | None], Tensor]


def naive(text: Tensor, t: int, kernel_size: int, dilation: int) -> Tensor:
    """The window of position t of a text (T, D), with zeros before its start."""
    positions = [t - (kernel_size - 1 - i) * dilation for i in range(kernel_size)]
    return torch.cat([text[p] if p >= 0 else torch.zeros(D) for p in positions])


def reader(kernel_size: int, dilation: int, static: bool, rows: int = B) -> tuple[Rows, ConvolutionCache, Advance]:
    state = Rows(torch.zeros(rows, dtype=torch.int64), max_len=64, uniform=not static, static=static)
    cache = ConvolutionCache(state, (kernel_size - 1) * dilation, dilation)

    def advance(x: Tensor, counts: Tensor | None) -> Tensor:
        window = cache.unfold(x, counts)
        state.advance(x.shape[1], counts)
        return window

    return state, cache, advance


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("kernel_size", "dilation"), [(2, 1), (3, 1), (3, 2), (2, 5), (4, 3)])
@pytest.mark.parametrize("steps", [[1] * 14, [5, 1, 1, 7], [14], [2, 2, 1, 9]])
def test_windows_of_any_step_sizes_equal_those_of_the_whole_text(
    kernel_size: int, dilation: int, steps: list[int], static: bool
) -> None:
    text = torch.randn(B, 14, D)
    _, cache, advance = reader(kernel_size, dilation, static)
    window = torch.cat([advance(x, None) for x in text.split(steps, 1)], 1)
    expected = [[naive(text[b], t, kernel_size, dilation) for t in range(14)] for b in range(B)]
    assert torch.equal(window, torch.stack([torch.stack(row) for row in expected]))
    assert cache.x is not None
    assert cache.x.shape == (B, (kernel_size - 1) * dilation, D)  # independent of the length of the text


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("kernel_size", "dilation"), [(3, 1), (3, 2), (2, 4)])
def test_windows_of_rows_of_different_lengths(kernel_size: int, dilation: int, static: bool) -> None:
    """Padding must not overwrite inputs that later windows need."""
    steps = [[3, 1, 7], [2, 6, 1], [1, 1, 1], [1, 4, 2], [1, 1, 1], [1, 1, 1]]
    texts = [torch.randn(sum(counts), D) for counts in zip(*steps, strict=True)]
    begins = [[0, *accumulate(counts)] for counts in zip(*steps, strict=True)]
    _, _, advance = reader(kernel_size, dilation, static)
    for n, counts in enumerate(steps):
        x = torch.full((B, max(counts), D), torch.nan)
        for b, count in enumerate(counts):
            x[b, :count] = texts[b][begins[b][n] : begins[b][n] + count]
        window = advance(x, None if set(counts) == {1} and n % 2 else torch.tensor(counts))
        for b, count in enumerate(counts):
            expected = [naive(texts[b], begins[b][n] + t, kernel_size, dilation) for t in range(count)]
            assert torch.equal(window[b, :count], torch.stack(expected)), (n, b)


def test_cache_supports_reorder_restart_and_keep() -> None:
    text = torch.randn(B, 6, D)
    for static in (False, True):
        state, cache, advance = reader(3, 2, static)
        for x in text[:, :5].split(1, 1):
            advance(x, None)
        assert cache.x is not None
        address, parent = cache.x.data_ptr(), torch.tensor([2, 0, 0])
        cache.reorder(parent)
        state.reorder(parent)
        assert cache.x.data_ptr() == address  # a captured CUDA graph reads the same memory
        window = advance(text[:, 5:], None)
        for b, origin in enumerate(parent.tolist()):
            row = torch.cat((text[origin, :5], text[b, 5:]))
            assert torch.equal(window[b, 0], naive(row, 5, 3, 2))
    state.restart(torch.tensor([1]))
    window = advance(text[:, :1], None)
    assert torch.equal(window[1, 0], naive(text[1], 0, 3, 2)), "entries of the former text are hidden"
    state, cache, advance = reader(2, 1, static=False)
    advance(text[:, :2], None)
    cache.keep(torch.tensor([2, 1]), torch.tensor([2, 1]))
    state.keep(torch.tensor([2, 1]))
    window = advance(text[[2, 1], 2:3], None)
    assert torch.equal(window[:, 0], torch.stack([naive(text[b], 2, 2, 1) for b in (2, 1)]))


@pytest.mark.parametrize(
    "extent",
    [
        KernelExtent(2, 0),
        KernelExtent(4, 0, 2),
        KernelExtent(1, 1),
        KernelExtent(3, 3, 3),
        KernelExtent(1, 2),
        KernelExtent(0, 0),
    ],
)
def test_unfold_returns_zeros_beyond_a_row_and_its_segment(extent: KernelExtent) -> None:
    x = torch.randn(2, 7, D)
    for packed, rows in ((False, [[1] * 5 + [0] * 2, [1] * 7]), (True, [[1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 2, 3, 3]])):
        seg = torch.tensor(rows)
        view = View(Mask(q_seg=seg, k_seg=seg, packed=packed, segments=3), 7, 7, x.device)
        window = unfold(x, extent, view)
        for b in range(2):
            for t in range(7):
                if seg[b, t]:
                    positions = [t - extent.left + i for i in extent.offsets()]
                    inside = [0 <= p < 7 and bool(seg[b, p] == seg[b, t]) for p in positions]
                    expected = [
                        x[b, p] if readable else torch.zeros(D) for p, readable in zip(positions, inside, strict=True)
                    ]
                    assert torch.equal(window[b, t], torch.cat(expected))


def test_receptive_field_of_stacked_layers() -> None:
    assert receptive_field([]) == 1
    assert receptive_field([(3, 1)] * 5) == 1 + 5 * (3 - 1)
    assert receptive_field([(3, d) for d in (1, 2, 4, 8, 16)] * 6) == 1 + 2 * 6 * 31
