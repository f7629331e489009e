"""Activation functions, keyed by name. To add a function, extend `Activation` and `ACTIVATIONS`."""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal[
    "relu", "gelu", "gelu_tanh", "swish", "elu", "selu", "sigmoid", "softplus", "linear", "tanh", "squared_relu"
]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # named gelu in the original code of BERT and T5
    "swish": F.silu,
    "elu": F.elu,
    "selu": F.selu,
    "sigmoid": lambda x: x.sigmoid(),
    "softplus": F.softplus,
    "linear": lambda x: x,
    "tanh": lambda x: x.tanh(),
    "squared_relu": lambda x: F.relu(x).square(),  # So et al. 2021
}
