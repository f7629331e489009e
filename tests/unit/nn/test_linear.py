from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from regard.nn.core import Role, Site
from regard.nn.init import Init
from regard.nn.linear import Dense

MakeSite = Callable[..., Site]
NUMBERS: dict[Role, float] = {"query": 1.0, "key": 2.0, "value": 3.0}


@dataclass(frozen=True, slots=True)
class Numbered(Init):
    """Fills a weight with a number that depends on the role."""

    kind = "numbered"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        with torch.no_grad():
            weight.fill_(NUMBERS[role])


def test_each_role_of_a_projection_is_initialised_separately(site: MakeSite) -> None:
    linear = site(init_=Numbered()).linear(5, {"query": 3, "key": 2, "value": 1})
    assert isinstance(linear, nn.Linear)
    assert linear.weight.shape == (6, 5)
    assert linear.weight[:, 0].tolist() == [1, 1, 1, 2, 2, 3]


def test_y_is_x_w_plus_b(site: MakeSite) -> None:
    linear = site().linear(5, {"up": 7})
    assert isinstance(linear, nn.Linear)
    nn.init.normal_(linear.bias)
    x = torch.randn(2, 3, 5)
    W, bias = linear.weight.tolist(), linear.bias.tolist()
    for row, actual in zip(x.flatten(0, 1).tolist(), linear(x).flatten(0, 1).tolist(), strict=True):
        assert actual == pytest.approx([sum(r * w for r, w in zip(row, W[o], strict=True)) + bias[o] for o in range(7)])


@pytest.mark.parametrize(
    ("default", "bias", "expected"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_the_bias_argument_overrides_the_default(
    default: bool, bias: bool | None, expected: bool, site: MakeSite
) -> None:
    linear = site(linear_=Dense(default)).linear(5, {"up": 7}, bias=bias)
    assert isinstance(linear, nn.Linear)
    assert (linear.bias is not None) is expected
    assert not expected or bool((linear.bias == 0).all())


def test_weights_are_initialised_once(site: MakeSite) -> None:
    """`nn.Linear` would initialise them first, which takes time and random numbers."""
    torch.manual_seed(3)
    linear = site().linear(5, {"up": 7})
    torch.manual_seed(3)
    weight = site().parameter(7, 5, role="up")
    assert torch.equal(linear.weight, weight)  # type: ignore[reportArgumentType]
