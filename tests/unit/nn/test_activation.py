import math
from typing import get_args

import pytest
import torch

from regard.nn.activation import ACTIVATIONS, Activation

ALPHA, SCALE = 1.6732632423543772, 1.0507009873554805  # Klambauer et al. 2017
FORMULAS = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "elu": lambda x: x if x > 0 else math.exp(x) - 1,
    "selu": lambda x: SCALE * (x if x > 0 else ALPHA * (math.exp(x) - 1)),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "softplus": lambda x: math.log(1 + math.exp(x)),
    "linear": lambda x: x,
    "tanh": math.tanh,
    "squared_relu": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("name", get_args(Activation))
def test_activation_is_its_formula(name: Activation) -> None:
    x = torch.linspace(-4, 4, 33)
    expected = [FORMULAS[name](value) for value in x.tolist()]
    assert ACTIVATIONS[name](x).tolist() == pytest.approx(expected, abs=1e-12)


def test_every_name_has_a_function() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS) == set(FORMULAS)
