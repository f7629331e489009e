import pytest
import torch

from regard.errors import SpecError
from regard.nn.pattern import Window


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_window_reaches_size_minus_one_each_way(size: int) -> None:
    positions = torch.arange(6)
    visible = Window(size).visible(positions[None, :, None], positions[None, None, :])[0]
    assert visible.tolist() == [[abs(i - j) < size for j in range(6)] for i in range(6)]


def test_a_window_holds_at_least_one_position() -> None:
    with pytest.raises(SpecError, match=r"^size: a window must hold at least one position, not 0"):
        Window(0)
