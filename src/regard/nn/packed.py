"""Weights laid out anew for products with few rows, which is what a step of decoding is on a CPU.

Such a product reads a weight once and hardly computes, so the order of the weight in memory decides how long it takes.
A copy in a better order is made when it is first of use: turned for a single row, in oneDNN's blocks for some rows. For
many rows there is nothing to gain. Measured in docs/decisions/010-speed.md.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

SOME = 32  # rows up to which blocks are faster
WIDE = 8  # a matrix with so many times more outputs than inputs, as a vocabulary, ...
MANY = 128  # ... is faster in blocks up to so many


class Layout:
    """Copies of one weight in other orders, made on first use and made anew whenever the weight has changed."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Keep no copy."""
        self.address = self.version = -1  # where the weight lay, and how often it had been written to
        self.turned: Tensor | None = None
        self.blocks: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layout":
        return Layout()  # a copied model has other weights, of which nobody knows yet what becomes of them

    def __reduce__(self) -> tuple[type["Layout"], tuple[()]]:
        return Layout, ()

    def _begin(self, weight: Float[Tensor, "o i"]) -> None:
        self.forget()
        self.address, self.version = weight.data_ptr(), weight._version
        outputs, self.inputs = weight.shape
        fits = weight.dtype == torch.float32 and weight.is_cpu
        self.one = 1 if fits and outputs >= self.inputs else 0
        self.some = (MANY if outputs >= WIDE * self.inputs else SOME) if fits else 0

    def product(
        self, x: Float[Tensor, "*n i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None
    ) -> Float[Tensor, "*n o"]:
        """x W' + b, by the fastest order. Every projection of a step calls this, so it asks as little as it can."""
        if weight._version != self.version or weight.data_ptr() != self.address:
            self._begin(weight)
        rows = x.numel() // self.inputs
        if rows == self.one:
            if self.turned is None:
                self.turned = weight.detach().t().contiguous().t()
            return F.linear(x, self.turned, bias)
        if 1 < rows <= self.some and x.dtype == torch.float32:
            if self.blocks is None:
                self.blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), SOME)
            return torch.ops.mkldnn._linear_pointwise.default(x, self.blocks, bias, "none", [], "")
        return F.linear(x, weight, bias)


class Packable(nn.Module):
    """Abstract: a module with one weight that is multiplied with, and that may be laid out."""

    weight: Tensor
    layout: Layout | None = None  # no tensor of the model: it is neither stored nor trained

    def product(self, x: Float[Tensor, "*n i"], bias: Float[Tensor, " o"] | None) -> Float[Tensor, "*n o"]:
        """x W' + b. Only in inference mode, where no gradient can be asked for, may the weight lie in another order."""
        if self.layout is None or not torch.is_inference_mode_enabled():
            return F.linear(x, self.weight, bias)
        return self.layout.product(x, self.weight, bias)

    def train(self, mode: bool = True) -> "Packable":
        if mode and self.layout is not None:
            self.layout.forget()  # what is trained may be written to in ways that leave no mark
        return super().train(mode)


def lay_out(model: nn.Module) -> None:
    """Let a model that is only used lay out the weights that it reads at every step of a decoding.

    An encoder reads a text once, many rows at a time, and is left as it is. Where torch has no oneDNN, so is all else.
    """
    if not available():
        return
    for name, part in model.named_children():
        if name == "encoder":
            continue
        for module in part.modules():
            if isinstance(module, Packable) and module.weight.is_cpu and not module.weight.is_inference():
                module.layout = Layout()


def available() -> bool:
    """Whether torch has what is needed; these operators are its own and not promised to anybody."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
