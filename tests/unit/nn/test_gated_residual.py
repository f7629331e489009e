from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.nn.core import Site
from regard.nn.gated_residual import GatedRecurrent
from regard.nn.linear import Dense
from regard.nn.mask import Context, Mask, View
from regard.nn.norm import LayerNorm
from regard.nn.rms_norm import RMSNorm
from tests.unit.nn.affine import Affine

MakeSite = Callable[..., Site]
CTX = Context(View(Mask(), 5, 5, torch.device("cpu")))


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A layer norm of one vector."""
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / len(x)
    return (x - mean) / (variance + 1e-5) ** 0.5 * weight + bias


def test_formula(site: MakeSite) -> None:
    """One vector at a time, from modifications.md 3.15; the branch works position by position."""
    branch, x = Affine(), torch.randn(2, 5, 12)
    rule: Any = GatedRecurrent().wrap(branch, site(linear_=Dense(bias=False)))
    for parameter in rule.parameters():
        nn.init.normal_(parameter, 0.5)
    P = {name: parameter.detach() for name, parameter in rule.named_parameters()}

    def gate(name: str, left: Tensor, right: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-(P[f"{name}.weight"] @ torch.cat((left, right)) + P[f"{name}.bias"])))

    def n(value: Tensor, name: str = "gate_norm") -> Tensor:
        return norm(value, P[f"{name}.weight"], P[f"{name}.bias"])

    expected = torch.empty_like(x)
    for b in range(2):
        for t in range(5):
            vector = x[b, t]
            y = n(vector, "norm") @ branch.matrix.detach() + 1.0
            z = gate("update", n(vector), n(y))
            r = gate("reset", n(n(vector)), n(n(y)))
            c = gate("candidate", n(r * vector), n(y))
            expected[b, t] = vector + (1 - z) * y + z * c
    torch.testing.assert_close(rule(x, CTX).detach(), expected)


def test_parameters(site: MakeSite) -> None:
    """Three gates with biases, even if other projections have none, and one norm more than pre-norm."""
    rule = GatedRecurrent(LayerNorm()).wrap(Affine(), site(linear_=Dense(bias=False)))
    parameters = sum(p.numel() for p in rule.parameters()) - 12 * 12
    assert parameters == 3 * (24 * 12 + 12) + 2 * 24
    assert isinstance(GatedRecurrent(RMSNorm()).end(site()), nn.RMSNorm)


def test_dropout_applies_to_the_gated_output(site: MakeSite) -> None:
    rule = GatedRecurrent().wrap(Affine(), site(dropout=0.5)).train()
    x = torch.randn(2, 50, 12)
    dropped = torch.isclose(rule(x, CTX), x).double().mean().item()
    assert 0.4 < dropped < 0.6
