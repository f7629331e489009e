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
    """Fills a weight with the number of its role."""

    kind = "numbered"

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        with torch.no_grad():
            weight.fill_(NUMBERS[role])


def test_each_part_of_a_projection_is_drawn_by_its_role(site: MakeSite) -> None:
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
    for row, got in zip(x.flatten(0, 1).tolist(), linear(x).flatten(0, 1).tolist(), strict=True):
        assert got == pytest.approx([sum(r * w for r, w in zip(row, W[o], strict=True)) + bias[o] for o in range(7)])


@pytest.mark.parametrize(
    ("kind", "asked", "has"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_a_part_may_overrule_the_kinds_bias(kind: bool, asked: bool | None, has: bool, site: MakeSite) -> None:
    linear = site(linear_=Dense(kind)).linear(5, {"up": 7}, bias=asked)
    assert isinstance(linear, nn.Linear)
    assert (linear.bias is not None) is has
    assert not has or bool((linear.bias == 0).all())


def test_weights_are_drawn_once(site: MakeSite) -> None:
    """nn.Linear would draw them itself first: twice the time, and other random numbers."""
    torch.manual_seed(3)
    linear = site().linear(5, {"up": 7})
    torch.manual_seed(3)
    alone = site().parameter(7, 5, role="up")
    assert torch.equal(linear.weight, alone)  # type: ignore[reportArgumentType]
