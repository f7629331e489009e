import math

import pytest
import torch
from torch import Tensor, nn

from regard.fast.dropout import BitDropout


def drop(x: Tensor, p: float, training: bool) -> Tensor:
    return BitDropout(p).train(training)(x)


def test_dropout_keeps_the_mean_and_is_off_in_evaluation() -> None:
    x = torch.ones(10_000)
    assert drop(x, 0.5, False) is x
    assert drop(x, 0.0, True) is x
    dropped = drop(x, 0.25, True)
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.75}
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9, 1 / 3])
def test_elements_are_dropped_independently_with_the_same_probability(p: float) -> None:
    """Four elements share 64 random bits: each must be kept with the same probability, independently."""
    torch.manual_seed(1)
    kept = drop(torch.ones(50_000, 4), p, True) != 0
    error = 4 * math.sqrt(p * (1 - p) / 50_000)
    assert kept.double().mean(0).tolist() == pytest.approx([1 - p] * 4, abs=error)
    both = kept[:, :, None] & kept[:, None, :]
    off = ~torch.eye(4, dtype=torch.bool)
    assert both.double().mean(0)[off].tolist() == pytest.approx([(1 - p) ** 2] * 12, abs=error)
    assert (kept[1:] & kept[:-1]).double().mean().item() == pytest.approx((1 - p) ** 2, abs=error)


def test_kept_elements_are_divided_by_the_rounded_probability() -> None:
    """0.1 is rounded to 6,554 / 65,536, and the mean stays exact."""
    values = drop(torch.ones(1000), 0.1, True).unique().tolist()
    assert values == [0.0, 65536 / 58982]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (), (3,), (2, 5, 7), (4, 1)])
def test_the_seed_determines_dropout_for_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    torch.manual_seed(7)
    first, second = drop(x, 0.5, True), drop(x, 0.5, True)
    torch.manual_seed(7)
    again = drop(x, 0.5, True)
    assert first.dtype == dtype
    assert first.shape == x.shape
    assert torch.equal(first, again)
    assert x.numel() < 20 or not torch.equal(first, second)


def test_gradients_of_dropout() -> None:
    x = torch.randn(5, 6, requires_grad=True)

    def dropped(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return drop(x.transpose(0, 1), 0.4, True)

    assert torch.autograd.gradcheck(dropped, (x,))
    assert torch.autograd.gradgradcheck(dropped, (x,))


@pytest.mark.parametrize("p", [1e-6, 1 - 1e-6])
def test_probabilities_below_1_in_65536_use_torch_dropout(p: float) -> None:
    x = torch.ones(1000)
    torch.manual_seed(2)
    expected = nn.functional.dropout(x, p)
    torch.manual_seed(2)
    assert torch.equal(drop(x, p, True), expected)
