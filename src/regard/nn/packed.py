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

_address: Any = getattr(torch._C, "_data_address", None)  # as data_ptr(), without asking for memory to write to
_lazy_clone: Any = getattr(torch, "_lazy_clone", None)


class PrepackedWeight:
    """Copies of one weight in other orders, made on first use and made anew whenever the weight has changed.

    A write through `.data` or by a fused optimizer does not change a tensor's version. So the weight is made a
    copy-on-write tensor that shares its memory with `original`: the first write to it, by whatever alias, moves the
    weight to memory of its own, and its address changes. Only a write past torch, by a numpy array that was made over
    the weight before, is missed. `frozen` is for memory that torch cannot move: there a write through `.data` is
    missed, too, and others are seen by the weight's version.
    """

    def __init__(self, frozen: bool = False) -> None:
        self.frozen = frozen
        self.forget()

    def forget(self) -> None:
        """Keep no copy."""
        self.address = -1  # where the weight lay; nothing else can, as long as `original` is there
        self.version = -1  # of a frozen weight
        self.original: Tensor | None = None
        self.turned: Tensor | None = None
        self.blocks: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrepackedWeight":
        return PrepackedWeight()  # a copied model has other weights, of which nobody knows yet what becomes of them

    def __reduce__(self) -> tuple[type["PrepackedWeight"], tuple[()]]:
        return PrepackedWeight, ()

    def _begin(self, weight: Float[Tensor, "o i"]) -> None:
        self.forget()
        outputs, self.inputs = weight.shape
        fits = weight.dtype == torch.float32 and weight.is_cpu
        if fits and not self.frozen:
            self.original = _watched(weight)
            fits = self.original is not None
        self.address = _address(weight)
        self.version = _version(weight) if self.frozen else -1
        self.one = 1 if fits and outputs >= self.inputs else -1
        self.some = (MANY if outputs >= WIDE * self.inputs else SOME) if fits else 0

    def product(
        self, x: Float[Tensor, "*n i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None
    ) -> Float[Tensor, "*n o"]:
        """x W' + b, by the fastest order. Every projection of a step calls this, so it asks as little as it can."""
        if _address(weight) != self.address or (self.frozen and _version(weight) != self.version):
            self._begin(weight)
        rows = x.numel() // self.inputs
        if rows == self.one:
            if self.turned is None:
                self.turned = weight.detach().t().contiguous().t()
            return F.linear(x, self.turned, bias)
        if 1 < rows <= self.some and x.dtype == torch.float32:
            if self.blocks is None:
                # Of a copy: the operator asks for memory that it may write to, which would move the weight.
                self.blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach().clone(), SOME)
            return torch.ops.mkldnn._linear_pointwise.default(x, self.blocks, bias, "none", [], "")
        return F.linear(x, weight, bias)


def _version(weight: Tensor) -> int:
    """Return the version counter of a tensor; 0 for one made in inference mode, which has none."""
    return 0 if weight.is_inference() else weight._version


def _watched(weight: Tensor) -> Tensor | None:
    """A copy that is made when somebody writes to the weight; None where its memory is not torch's own."""
    try:
        return _lazy_clone(weight.detach())
    except RuntimeError:
        return None


class PrepackableLinear(nn.Module):
    """Abstract: a module with one weight that is multiplied with, and that may be laid out."""

    weight: Tensor
    layout: PrepackedWeight | None = None  # no tensor of the model: it is neither stored nor trained

    def product(self, x: Float[Tensor, "*n i"], bias: Float[Tensor, " o"] | None) -> Float[Tensor, "*n o"]:
        """x W' + b. Only in inference mode, where no gradient can be asked for, may the weight lie in another order."""
        if self.layout is None or not torch.is_inference_mode_enabled():
            return F.linear(x, self.weight, bias)
        return self.layout.product(x, self.weight, bias)

    def train(self, mode: bool = True) -> "PrepackableLinear":
        if mode and self.layout is not None:
            self.layout.forget()  # a step of training writes to all of it
        return super().train(mode)


def lay_out(model: nn.Module, frozen: bool = False) -> None:
    """Let a model that is only used lay out the weights that it reads at every step of a decoding.

    An encoder reads a text once, many rows at a time, and is left as it is. Where torch has no oneDNN, so is all else.
    Whoever changes a weight later gets the products of the changed one. `frozen` promises that nobody will: for weights
    in memory that is not torch's own, such as a mapped file, which are otherwise left as they are.
    """
    if not available():
        return
    for name, part in model.named_children():
        if name == "encoder":
            continue
        for module in part.modules():
            if isinstance(module, PrepackableLinear) and module.weight.is_cpu and not module.weight.is_inference():
                module.layout = PrepackedWeight(frozen)


def available() -> bool:
    """Whether torch has what is needed; these operators are its own and not promised to anybody."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    if _address is None or _lazy_clone is None:
        return False
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
