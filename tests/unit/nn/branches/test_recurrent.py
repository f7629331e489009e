from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.errors import DataError, SpecError
from regard.models.build import build
from regard.nn.branches.recurrent import Recurrence
from regard.nn.core import Site
from regard.nn.mask import Context, Mask, View
from regard.nn.recurrent import Elman, LearnedStart
from regard.presets import preset
from regard.testing import tiny

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")


def test_an_elman_branch_by_formula(site: MakeSite) -> None:
    """h_t = tanh(W_x x_t + W_h h_(t-1) + b) from a learned h_0, then W_o; backwards from each row's own end."""
    D, H, T = 8, 3, 5
    lengths = [5, 2]
    seg = torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    spec = Recurrence(Elman(), d_hidden=H, bidirectional=True, start=LearnedStart(), output=True)
    branch: Any = spec.build(site(d_model=D, causal=False))
    for parameter in branch.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    x = torch.randn(2, T, D)
    y = branch(x, Context(View(Mask(q_seg=seg, k_seg=seg), T, T, CPU)))
    for row, length in enumerate(lengths):
        states = torch.zeros(length, 2 * H)
        for direction, order in enumerate((range(length), reversed(range(length)))):
            cell, h = branch.layer.cells[direction], branch.layer.starts[direction].state[0]
            for t in order:
                h = torch.tanh(cell.input.weight @ x[row, t] + cell.input.bias + cell.hidden.weight @ h)
                states[t, direction * H : (direction + 1) * H] = h
        expected = states @ branch.output.weight.T + branch.output.bias
        torch.testing.assert_close(y[row, :length], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        (Recurrence(bidirectional=True), {"causal": True}, r"^bidirectional: a causal stack must not read later"),
        (Recurrence(bidirectional=True), {"causal": False, "d_model": 9}, "^d_hidden: two directions cannot share"),
        (Recurrence(d_hidden=3), {}, "^output: without W_o the states must be d_model"),
    ],
)
def test_invalid_specs_are_refused(spec: Recurrence, sizes: dict[str, Any], message: str, site: MakeSite) -> None:
    with pytest.raises(SpecError, match=message):
        spec.build(site(**sizes))


def test_a_width_is_positive() -> None:
    with pytest.raises(SpecError, match=r"^d_hidden: must be at least 1, not 0"):
        Recurrence(d_hidden=0)


def test_packed_rows_are_refused() -> None:
    spec = replace(preset("lstm_lm"), vocab=tiny.VOCAB, d_model=8)  # type: ignore[reportCallIssue]
    batch = tiny.collate(spec, tiny.examples(spec, 2), packed=True)
    with pytest.raises(DataError, match=r"^packed: a recurrence would carry its state from one text of a row"):
        build(spec).loss(batch)
