"""Variants of layer normalisation that appear in lectures but not in torch."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.precision import widen


class LayerNormModule(nn.Module):
    def __init__(self, shape: tuple[int] | None, bias: bool, eps: float, outside: bool) -> None:
        super().__init__()
        self.weight = None if shape is None else nn.Parameter(torch.ones(shape))
        self.bias = None if shape is None or not bias else nn.Parameter(torch.zeros(shape))
        self.eps, self.outside = eps, outside

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        wide = widen(x)
        centred = wide - wide.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        root = variance.sqrt() + self.eps if self.outside else (variance + self.eps).sqrt()
        y = (centred / root).type_as(x)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias
