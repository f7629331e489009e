import pytest
import torch

from regard.nn.causal_convolution import Taps, foreign, read
from regard.nn.mask import Mask, View
from regard.nn.state import ActivationCache, Rows

CPU = torch.device("cpu")
SEG = torch.tensor([[1, 1, 2, 2, 0]])


def stream(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)[:, :, None]


@pytest.mark.parametrize(
    ("taps", "mask", "expected"),
    [
        (Taps(2, 0), Mask(), [0, 0, 1, 2, 3, 4, 5]),
        (Taps(1, 1), Mask(), [0, 1, 2, 3, 4, 5, 0]),
        (Taps(1, 1), Mask(k_seg=SEG), [0, 1, 2, 3, 4, 0, 0]),
        (Taps(1, 0), Mask(k_seg=SEG), [0, 1, 2, 3, 4, 5]),  # no real token reads the padding behind it
    ],
)
def test_zeros_around_the_stream_and_in_padding(taps: Taps, mask: Mask, expected: list[float]) -> None:
    found = read(stream(1, 2, 3, 4, 5), taps, View(mask, 5, 5, CPU))
    assert found.flatten().tolist() == expected


def test_segments_of_a_packed_row_do_not_read_each_other() -> None:
    taps, packed = Taps(1, 1), View(Mask(q_seg=SEG, k_seg=SEG, packed=True), 5, 5, CPU)
    others = foreign(taps, packed)
    assert others is not None
    assert [other.int().tolist()[0][:4] for other in others] == [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]]
    assert foreign(taps, packed) is others  # once for all layers
    assert foreign(taps, View(Mask(q_seg=SEG, k_seg=SEG), 5, 5, CPU)) is None


@pytest.mark.parametrize("static", [False, True])
def test_a_step_reads_what_came_before_it_in_its_row(static: bool) -> None:
    rows = Rows(torch.zeros(2, dtype=torch.int64), 6, uniform=not static, static=static)
    past, taps = ActivationCache(rows), Taps(2, 0)

    def step(x: list[list[float]], counts: list[int] | None = None) -> list[list[float]]:
        new = torch.tensor(x, dtype=torch.float64)[:, :, None]
        width = new.shape[1]
        found = read(new, taps, View(rows.mask(width), width, rows.reach(width), CPU), past)
        rows.advance(width, None if counts is None else torch.tensor(counts))
        return found[:, :, 0].tolist()

    assert step([[1, 2, 3], [7, 0, 0]], [3, 1]) == [[0, 0, 1, 2, 3], [0, 0, 7, 0, 0]]
    assert step([[4], [8]]) == [[2, 3, 4], [0, 7, 8]]
    past.reorder(torch.tensor([1, 1]))
    rows.reorder(torch.tensor([1, 1]))
    assert step([[5], [6]]) == [[7, 8, 5], [7, 8, 6]]
