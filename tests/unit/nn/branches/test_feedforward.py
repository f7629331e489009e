from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from regard.errors import SpecError
from regard.nn.activation import ACTIVATIONS
from regard.nn.branches.feedforward import FeedForward
from regard.nn.core import Branch, Site
from regard.nn.linear import Dense
from regard.nn.mask import Context, Mask, View

MakeSite = Callable[..., Site]
CTX = Context(View(Mask(), 4, 4, torch.device("cpu")))


def branch_of(spec: FeedForward, site: Site) -> Branch:
    branch = spec.build(site)
    for parameter in branch.parameters():
        nn.init.normal_(parameter)
    return branch


@pytest.mark.parametrize("name", ["relu", "gelu", "tanh", "squared_relu"])
def test_ungated_by_formula(name: Any, site: MakeSite) -> None:
    branch: Any = branch_of(FeedForward(7, name), site())
    x = torch.randn(2, 4, 12)
    hidden = ACTIVATIONS[name](x @ branch.up.weight.T + branch.up.bias)
    torch.testing.assert_close(branch(x, CTX), hidden @ branch.down.weight.T + branch.down.bias)


@pytest.mark.parametrize("name", ["relu", "gelu", "swish", "sigmoid", "linear"])
def test_gated_by_formula(name: Any, site: MakeSite) -> None:
    """Shazeer 2020: (phi(x W) * (x V)) W_2. The first factor is activated, and initialised as the gate."""
    branch: Any = branch_of(FeedForward(7, name, gated=True), site())
    x = torch.randn(2, 4, 12)
    W, V = branch.gate_up.weight[:7], branch.gate_up.weight[7:]
    b, c = branch.gate_up.bias[:7], branch.gate_up.bias[7:]
    hidden = ACTIVATIONS[name](x @ W.T + b) * (x @ V.T + c)
    torch.testing.assert_close(branch(x, CTX), hidden @ branch.down.weight.T + branch.down.bias)


@pytest.mark.parametrize("gated", [False, True])
def test_moves_no_information_between_tokens(gated: bool, site: MakeSite) -> None:
    """C32: the Jacobian is block-diagonal."""
    branch, x = branch_of(FeedForward(7, "gelu", gated), site()), torch.randn(1, 3, 12)
    J = torch.autograd.functional.jacobian(lambda x: branch(x, CTX), x)[0, :, :, 0]  # type: ignore[reportCallIssue, reportArgumentType, reportIndexIssue]
    for i in range(3):
        for j in range(3):
            assert bool((J[i, :, j] == 0).all()) is (i != j)


@pytest.mark.parametrize(
    ("gated", "bias", "count"), [(False, None, 1212), (False, False, 1152), (True, None, 1836), (True, False, 1728)]
)
def test_parameters(gated: bool, bias: bool | None, count: int, site: MakeSite) -> None:
    """Four times the width by default: 2 x 12 x 48 weights and 60 biases; gated: 3 x 12 x 48 and 108."""
    branch = FeedForward(gated=gated, bias=bias).build(site())
    assert sum(p.numel() for p in branch.parameters()) == count


def test_biases_follow_the_linear_spec_unless_set(site: MakeSite) -> None:
    def biases(bias: bool | None) -> int:
        branch = FeedForward(7, bias=bias).build(site(linear_=Dense(bias=False)))
        return sum(p.numel() for name, p in branch.named_parameters() if name.endswith("bias"))

    assert (biases(None), biases(True), biases(False)) == (0, 19, 0)


@pytest.mark.parametrize("gated", [False, True])
def test_activation_dropout_in_training_only(gated: bool, site: MakeSite) -> None:
    branch, x = branch_of(FeedForward(7, gated=gated), site(activation_dropout=0.5)), torch.randn(2, 4, 12)
    assert not torch.equal(branch(x, CTX), branch(x, CTX))
    branch.eval()
    assert torch.equal(branch(x, CTX), branch(x, CTX))


def test_zero_hidden_width_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^d_hidden: must be at least 1, not 0"):
        FeedForward(0)
