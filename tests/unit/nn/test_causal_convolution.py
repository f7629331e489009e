import pytest
import torch

from regard.nn.cache import ActivationCache, Rows
from regard.nn.causal_convolution import KernelExtent, other_segments, pad_stream
from regard.nn.mask import Mask, View

CPU = torch.device("cpu")
SEG = torch.tensor([[1, 1, 2, 2, 0]])


def sequence(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)[:, :, None]


@pytest.mark.parametrize(
    ("extent", "mask", "expected"),
    [
        (KernelExtent(2, 0), Mask(), [0, 0, 1, 2, 3, 4, 5]),
        (KernelExtent(1, 1), Mask(), [0, 1, 2, 3, 4, 5, 0]),
        (KernelExtent(1, 1), Mask(k_seg=SEG), [0, 1, 2, 3, 4, 0, 0]),
        (KernelExtent(1, 0), Mask(k_seg=SEG), [0, 1, 2, 3, 4, 5]),  # causal: no real token reads padding
    ],
)
def test_padding_is_zero_on_both_sides_and_for_padding_tokens(
    extent: KernelExtent, mask: Mask, expected: list[float]
) -> None:
    padded = pad_stream(sequence(1, 2, 3, 4, 5), extent, View(mask, 5, 5, CPU))
    assert padded.flatten().tolist() == expected


def test_other_segments_of_a_packed_row_are_marked() -> None:
    extent, packed = KernelExtent(1, 1), View(Mask(q_seg=SEG, k_seg=SEG, packed=True), 5, 5, CPU)
    masks = other_segments(extent, packed)
    assert masks is not None
    assert [mask.int().tolist()[0][:4] for mask in masks] == [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]]
    assert other_segments(extent, packed) is masks  # once for all layers
    assert other_segments(extent, View(Mask(q_seg=SEG, k_seg=SEG), 5, 5, CPU)) is None


@pytest.mark.parametrize("static", [False, True])
def test_decoding_steps_are_padded_with_the_cached_inputs_of_their_row(static: bool) -> None:
    rows = Rows(torch.zeros(2, dtype=torch.int64), 6, uniform=not static, static=static)
    cache, extent = ActivationCache(rows), KernelExtent(2, 0)

    def step(x: list[list[float]], counts: list[int] | None = None) -> list[list[float]]:
        new = torch.tensor(x, dtype=torch.float64)[:, :, None]
        width = new.shape[1]
        padded = pad_stream(new, extent, View(rows.mask(width), width, rows.reach(width), CPU), cache)
        rows.advance(width, None if counts is None else torch.tensor(counts))
        return padded[:, :, 0].tolist()

    assert step([[1, 2, 3], [7, 0, 0]], [3, 1]) == [[0, 0, 1, 2, 3], [0, 0, 7, 0, 0]]
    assert step([[4], [8]]) == [[2, 3, 4], [0, 7, 8]]
    cache.reorder(torch.tensor([1, 1]))
    rows.reorder(torch.tensor([1, 1]))
    assert step([[5], [6]]) == [[7, 8, 5], [7, 8, 6]]
