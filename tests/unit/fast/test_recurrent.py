"""Fused recurrent kernels equal the step-by-step formulas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard import fast
from regard.fast.recurrent import FusedCell
from regard.nn.core import Site
from regard.nn.linear import Dense
from regard.nn.recurrent import GRU, LSTM, Cell, Elman

B, T, D, H = 4, 7, 5, 6
LENGTHS = torch.tensor([3, 7, 1, 5])
CELLS = {"tanh": Elman(), "relu": Elman("relu"), "gru": GRU(), "lstm": LSTM(0.0)}


def inputs(parts: int) -> list[torch.Tensor]:
    return [torch.randn(B, T, D, requires_grad=True), *(torch.randn(B, H, requires_grad=True) for _ in range(parts))]


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_fused_cells_have_the_states_and_gradients_of_the_formula(
    cell: Cell, bias: bool, lengths: torch.Tensor | None, site: Callable[..., Site]
) -> None:
    module: Any = cell.build(D, H, site(linear_=Dense(bias)))
    x, *state = inputs(module.parts)
    leaves = [x, *state, *module.parameters()]
    real = torch.arange(T) < (torch.full((B,), T) if lengths is None else lengths)[:, None]

    def run() -> list[torch.Tensor]:
        y, last = module(x, tuple(state), lengths)
        loss = (y[real] ** 2).sum() + sum((part**3).sum() for part in last)
        return [y[real], *last, *torch.autograd.grad(loss, leaves)]

    expected = run()
    fast.install(module)
    assert isinstance(module, FusedCell)
    for fused, plain in zip(run(), expected, strict=True):
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-11)


def test_single_tokens_use_the_formula(site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = LSTM().build(D, H, site())
    fast.install(module)
    monkeypatch.setattr(type(module), "fused", None)
    y, _ = module(torch.randn(B, 1, D), (torch.zeros(B, H), torch.zeros(B, H)))
    assert y.shape == (B, 1, H)
