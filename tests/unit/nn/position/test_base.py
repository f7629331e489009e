import torch

from regard.nn.mask import Mask, View
from regard.nn.position.base import Positions, positions_of

CPU = torch.device("cpu")


def test_distance_is_key_minus_query() -> None:
    q, k = torch.tensor([[4, 7]]), torch.tensor([[0, 5, 9]])
    assert Positions(q, k, 10).distances().tolist() == [[[-4, 1, 5], [-7, -2, 2]]]


def test_distances_with_different_positions_per_row() -> None:
    q, k = torch.tensor([[4], [1]]), torch.tensor([[0, 1, 2, 3, 4]])
    assert Positions(q, k, 5).distances().tolist() == [[[-4, -3, -2, -1, 0]], [[-1, 0, 1, 2, 3]]]


def test_positions_of_a_view() -> None:
    positions = positions_of(View(Mask(start=3), 2, 5, CPU))
    assert (positions.q.tolist(), positions.k.tolist(), positions.bound) == ([[3, 4]], [[0, 1, 2, 3, 4]], 5)
    within = torch.tensor([[0, 1, 0, 1, 2]])
    positions = positions_of(View(Mask(q_pos=within, k_pos=within, packed=True, longest=3), 5, 5, CPU))
    assert (positions.q.tolist(), positions.k.tolist(), positions.bound) == (within.tolist(), within.tolist(), 3)
