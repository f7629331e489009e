"""Recurrences against torch's own RNN, GRU and LSTM with copied weights, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard import fast
from regard.errors import SpecError
from regard.nn.cache import RecurrentState, Rows
from regard.nn.core import Site
from regard.nn.init import Xavier
from regard.nn.linear import Dense
from regard.nn.recurrent import GRU, LSTM, Cell, Elman, Layer, LearnedStart, ZeroStart
from regard.weights import Input, copy_from, total

B, T, D, H = 4, 7, 5, 6
LENGTHS = torch.tensor([3, 7, 1, 5])
CELLS: list[tuple[Cell, Any, dict[str, Any]]] = [
    (Elman(), nn.RNN, {"nonlinearity": "tanh"}),
    (Elman("relu"), nn.RNN, {"nonlinearity": "relu"}),
    (GRU(), nn.GRU, {}),
    (LSTM(), nn.LSTM, {}),
]
each_cell = pytest.mark.parametrize(("cell", "theirs", "options"), CELLS, ids=["tanh", "relu", "gru", "lstm"])


def site(bias: bool = True) -> Site:
    return Site(D, 1, D, D, "encoder", False, 0, 1, 1, 0, 1, 0.0, 0.0, 0.0, Dense(bias), Xavier())


def copied(theirs: Any, layer: int, cell: Any, suffix: str = "") -> None:
    """Copy torch's weights of one layer and direction. If the cell has one bias, it gets the sum of torch's two."""
    mapping: dict[str, Input] = {"input.weight": "weight_ih", "hidden.weight": "weight_hh"}
    if cell.hidden.bias is None:
        mapping["input.bias"] = total("bias_ih", "bias_hh")
    else:
        mapping |= {"input.bias": "bias_ih", "hidden.bias": "bias_hh"}
    end = f"_l{layer}{suffix}"
    weights = {name.removesuffix(end): weight for name, weight in theirs.state_dict().items() if name.endswith(end)}
    copy_from(cell, mapping, weights)


def stack(cell: Cell, theirs: Any, depth: int, both: bool) -> list[Layer]:
    layers = []
    for i in range(depth):
        width = D if i == 0 else (2 * H if both else H)
        layer = Layer(cell, width, H, "both" if both else "forwards", ZeroStart(), site()).double()
        copied(theirs, i, layer.cells[0])
        if both:
            copied(theirs, i, layer.cells[1], "_reverse")
        layers.append(layer)
    return layers


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(("depth", "both"), [(1, False), (2, False), (2, True)], ids=["one", "two", "both ways"])
@each_cell
def test_states_and_gradients_equal_torch(
    cell: Cell, theirs: Any, options: dict[str, Any], depth: int, both: bool, fused: bool, padded: bool
) -> None:
    torch.manual_seed(0)
    reference = theirs(D, H, depth, batch_first=True, bidirectional=both, **options).double()
    layers = stack(cell, reference, depth, both)
    if fused:
        fast.install(nn.ModuleList(layers))
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    lengths = LENGTHS if padded else torch.full((B,), T)
    packed, last = reference(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    expected, _ = pad_packed_sequence(packed, batch_first=True, total_length=T)
    finals = last if isinstance(last, tuple) else (last,)
    y, last_states = x, []
    for layer in layers:
        y, state = layer(y, lengths if padded else None)
        last_states.append(state)
    real = torch.arange(T) < lengths[:, None]
    torch.testing.assert_close(y[real], expected[real], rtol=0, atol=1e-12)
    ways = 2 if both else 1
    for part, final in enumerate(finals):  # (depth * ways, B, H)
        for i in range(depth):
            their = final[i * ways : (i + 1) * ways].transpose(0, 1).flatten(1)
            torch.testing.assert_close(last_states[i][part], their, rtol=0, atol=1e-12)

    def loss(states: Tensor, ends: Tensor) -> Tensor:
        return (states[real] ** 2).sum() + (ends**3).sum()

    ends = torch.stack([part for state in last_states for part in state])
    (our,) = torch.autograd.grad(loss(y, ends), x)
    (their,) = torch.autograd.grad(loss(expected, torch.cat(finals)), x)
    torch.testing.assert_close(our, their, rtol=0, atol=1e-11)


@pytest.mark.parametrize("bias", [True, False])
@each_cell
def test_fused_cells_equal_the_formula(cell: Cell, theirs: Any, options: dict[str, Any], bias: bool) -> None:
    """`step` computes a token in decoding, and every token where a projection is more than a product."""
    if not bias and isinstance(cell, LSTM):
        cell = LSTM(forget_bias=0.0)
    torch.manual_seed(1)
    module: Any = cell.build(D, H, site(bias)).double()
    x = torch.randn(B, T, D, dtype=torch.float64)
    state = tuple(torch.randn(B, H, dtype=torch.float64) for _ in range(module.parts))
    y, last = module(x, state, LENGTHS)
    fast.install(module)
    fused, fused_last = module(x, state, LENGTHS)
    real = torch.arange(T) < LENGTHS[:, None]
    torch.testing.assert_close(fused[real], y[real], rtol=0, atol=1e-12)
    for a, b in zip(fused_last, last, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    reference = theirs(D, H, batch_first=True, bias=bias, **options).double()
    assert sum(p.numel() for p in reference.parameters()) >= sum(p.numel() for p in module.parameters())


def test_every_row_begins_with_the_learned_start() -> None:
    layer: Any = Layer(LSTM(), D, H, "both", LearnedStart(), site()).double()
    x = torch.randn(B, T, D, dtype=torch.float64)
    reference = nn.LSTM(D, H, batch_first=True, bidirectional=True).double()
    for cell, suffix in zip(layer.cells, ("", "_reverse"), strict=True):
        copied(reference, 0, cell, suffix)
    with torch.no_grad():
        starts = torch.stack([start.state for start in layer.starts])  # (ways, parts, H)
        h, c = (starts[:, part, None].expand(-1, B, -1).contiguous() for part in range(2))
        expected, _ = reference(x, (h, c))
        y, _ = layer(x, None)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def test_forget_bias_is_the_initial_bias_of_the_forget_gate() -> None:
    cell: Any = LSTM(forget_bias=2.0).build(D, H, site())
    bias = cell.input.bias
    assert bias.unflatten(0, (4, H)).mean(1).tolist() == [0.0, 2.0, 0.0, 0.0]
    with pytest.raises(SpecError, match=r"^forget_bias: the model's linear layers have no biases"):
        LSTM().build(D, H, site(bias=False))


def test_a_hidden_state_is_reordered_with_its_rows() -> None:
    rows = Rows(torch.zeros(4, dtype=torch.int64), 5)
    states = tuple(torch.arange(8.0).view(4, 2) + 10 * part for part in range(2))
    hidden = RecurrentState(rows, states)
    hidden.reorder(torch.tensor([1, 1, 0, 3]))
    assert hidden.parts[1][:, 0].tolist() == [12.0, 12.0, 10.0, 16.0]
    assert states[0][0, 0] == 0.0  # a state of its own
    hidden.put(RecurrentState(rows, states), torch.tensor([3]), torch.tensor([0]))
    assert hidden.parts[0][:, 0].tolist() == [6.0, 2.0, 0.0, 6.0]
    rows.real = torch.tensor([1, 0, 1, 0])
    hidden.write(tuple(part + 100 for part in hidden.parts))
    assert hidden.parts[0][:, 0].tolist() == [106.0, 2.0, 100.0, 6.0]
    hidden.keep(torch.tensor([2, 0]), torch.tensor([2, 0]))
    assert hidden.parts[0][:, 0].tolist() == [100.0, 106.0]
