"""A branch with a simple formula, for tests of residual rules."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.nn.cache import KVCache, Rows
from regard.nn.core import Branch
from regard.nn.mask import Context


class Affine(Branch):
    """f(x) = x A + 1. Records the decoding states that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(12, 12))
        self.states: list[Any] = []

    def forward(self, x: Tensor, ctx: Context, state: Any = None) -> Tensor:
        self.states.append(state)
        return self.f(x)

    def f(self, x: Tensor) -> Tensor:
        return x @ self.matrix + 1.0

    def start(self, rows: Rows, ctx: Context) -> Any:
        return KVCache(rows)
