"""Prepacked weights for matrix products with few rows (tokens), for example in a decoding step on a CPU.

A product with few rows is limited by memory bandwidth, so its time depends on the memory layout of the weight. A copy
in a faster layout is made on first use: transposed for a single row, in oneDNN's blocks for several rows. For many
rows, no layout is faster. Measurements are in docs/decisions/010-speed.md.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.models.baselines.weight_norm import NormedRows
from regard.nn.linear import Projection
from regard.nn.vocab.tables import EmbeddingsModule

SOME = 32  # number of rows up to which oneDNN's blocks are faster
WIDE = 8  # a weight is wide if it has at least this many outputs per input, as the weight for a vocabulary has
MANY = 128  # number of rows up to which oneDNN's blocks are faster for a wide weight

_address: Any = getattr(torch._C, "_data_address", None)  # data_ptr() without a request for write access
_lazy_clone: Any = getattr(torch, "_lazy_clone", None)


class PrepackedWeight:
    """Copies of one weight in other memory layouts, made on first use and again whenever the weight has changed.

    A write through `.data` or by a fused optimizer does not change a tensor's version counter. So the weight becomes a
    copy-on-write tensor that shares its memory with `original`. The first write to the weight, through any alias, moves
    the weight to new memory and thus changes its address. Only a write that bypasses torch, for example through a numpy
    array, is not detected.

    A `frozen` weight is in memory that torch cannot move. Its changes are detected by the version counter, except for
    writes through `.data`.
    """

    def __init__(self, frozen: bool = False) -> None:
        self.frozen = frozen
        self.discard()

    def discard(self) -> None:
        """Discard the copies of the weight."""
        self.address = -1  # the weight's address, which no other tensor can have while `original` exists
        self.version = -1  # the weight's version, if frozen
        self.original: Tensor | None = None
        self.transposed: Tensor | None = None
        self.blocks: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrepackedWeight":
        return PrepackedWeight()  # a copied model has other weights, which may be trained or moved

    def __reduce__(self) -> tuple[type["PrepackedWeight"], tuple[()]]:
        return PrepackedWeight, ()

    def _begin(self, weight: Float[Tensor, "o i"]) -> None:
        self.discard()
        outputs, self.inputs = weight.shape
        fits = weight.dtype == torch.float32 and weight.is_cpu
        if fits and not self.frozen:
            self.original = _alias(weight)
            fits = self.original is not None
        self.address = _address(weight)
        self.version = _version(weight) if self.frozen else -1
        self.single = 1 if fits and outputs >= self.inputs else -1
        self.several = (MANY if outputs >= WIDE * self.inputs else SOME) if fits else 0

    def product(
        self, x: Float[Tensor, "*n i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None
    ) -> Float[Tensor, "*n o"]:
        """Return x W' + b, with W in the fastest layout. Every linear layer calls this method, so it must be fast."""
        if _address(weight) != self.address or (self.frozen and _version(weight) != self.version):
            self._begin(weight)
        rows = x.numel() // self.inputs
        if rows == self.single:
            if self.transposed is None:
                self.transposed = weight.detach().t().contiguous().t()
            return F.linear(x, self.transposed, bias)
        if 1 < rows <= self.several and x.dtype == torch.float32:
            if self.blocks is None:
                # From a copy: the operator requests write access to its input, which would move the weight.
                self.blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach().clone(), SOME)
            return torch.ops.mkldnn._linear_pointwise.default(x, self.blocks, bias, "none", [], "")
        return F.linear(x, weight, bias)


def _version(weight: Tensor) -> int:
    """Return the version counter of a tensor, or 0 for an inference tensor, which has no counter."""
    return 0 if weight.is_inference() else weight._version


def _alias(weight: Tensor) -> Tensor | None:
    """Return a copy-on-write alias of the weight, or None if torch does not own the weight's memory."""
    try:
        return _lazy_clone(weight.detach())
    except RuntimeError:
        return None


class Prepacked(nn.Module):
    """Abstract base class of modules that multiply the input by one weight, which is prepacked in inference mode."""

    weight: Tensor
    prepacked: PrepackedWeight

    def product(self, x: Float[Tensor, "*n i"], bias: Float[Tensor, " o"] | None) -> Float[Tensor, "*n o"]:
        """Return x W' + b. In inference mode, where there is no gradient, a prepacked copy of the weight is used."""
        if not torch.is_inference_mode_enabled():
            return F.linear(x, self.weight, bias)
        return self.prepacked.product(x, self.weight, bias)

    def train(self, mode: bool = True) -> "Prepacked":
        if mode:
            self.prepacked.discard()  # training changes the weight at every step
        return super().train(mode)


class PrepackedLinear(Prepacked, Projection):
    """A linear layer x W' + b with a prepacked weight."""

    def forward(self, input: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:  # torch's name
        return self.product(input, self.bias)


class PrepackedEmbeddings(Prepacked, EmbeddingsModule):
    """An embedding table that computes logits from a prepacked weight."""

    def logits(self, h: Float[Tensor, "*n W"]) -> Float[Tensor, "*n V"]:
        return self.product(h, None)


class CachedRows(NormedRows):
    """Matrix with weight-normalised rows, which is cached in decoding on a CPU until the parameters change.

    On a GPU, the matrix is not cached, for two reasons: it is cheap to compute, and a step captured as a CUDA graph
    could not check whether the cached matrix is up to date.
    """

    cached: "CachedProduct"

    def forward(self) -> Float[Tensor, "o i"]:
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled() and self.direction.is_cpu:
            return self.cached.get(self)
        return super().forward()

    def train(self, mode: bool = True) -> "CachedRows":
        self.cached = CachedProduct()  # training may change the weights without a change of version
        return super().train(mode)


class CachedProduct:
    """The cached matrix of a `CachedRows` module. It is neither a parameter nor a buffer of the model."""

    def __init__(self) -> None:
        self.version: tuple[int, ...] = ()
        self.weight: Tensor | None = None

    def get(self, rows: CachedRows) -> Float[Tensor, "o i"]:
        """Return the matrix with weight-normalised rows, computed again if the parameters have changed."""
        parts = (rows.direction, rows.length)
        if any(part.is_inference() for part in parts):  # tensors without a version
            return NormedRows.forward(rows)
        version = tuple(number for part in parts for number in (part.data_ptr(), part._version))
        if self.weight is None or version != self.version:
            self.version, self.weight = version, NormedRows.forward(rows)
        return self.weight

    def __deepcopy__(self, memo: dict[int, Any]) -> "CachedProduct":
        return CachedProduct()

    def __reduce__(self) -> tuple[type["CachedProduct"], tuple[()]]:
        return CachedProduct, ()


def available() -> bool:
    """Return whether torch has the operators for prepacking, which are not part of the public interface of torch."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    if _address is None or _lazy_clone is None:
        return False
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
