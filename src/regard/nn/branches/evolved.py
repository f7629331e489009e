"""The branches of So et al. 2019, "The Evolved Transformer"."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.nn.branches.base import BranchSpec
from regard.nn.cache import ActivationCache, Rows
from regard.nn.causal_convolution import KernelExtent, convolve, kernel_extent, other_segments, pad_stream, windows
from regard.nn.core import Branch, Role, Site
from regard.nn.mask import Context
from regard.nn.norm import LayerNorm, Norm


@dataclass(frozen=True, slots=True)
class GatedLinear(BranchSpec):
    """Gated linear unit (x W + b) * sigmoid(x V + c), with d_model output channels. Dauphin et al. 2017."""

    kind = "gated_linear"
    bias: bool | None = None  # None: the default of the model's linear layers

    def build(self, site: Site) -> Branch:
        return GatedLinearModule(self.bias, site)


class GatedLinearModule(Branch):
    def __init__(self, bias: bool | None, site: Site) -> None:
        super().__init__()
        self.gated = site.linear(site.d_model, {"value": site.d_model, "gate": site.d_model}, bias=bias)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:  # noqa: ARG002
        return F.glu(self.gated(x), -1)


@dataclass(frozen=True, slots=True)
class EvolvedEncoderConv(BranchSpec):
    """The convolutions of an Evolved Transformer encoder block.

    h = norm(relu(x W) + [relu(conv_3(x)), 0]), y = [separable_9(h), 0]. Indices are kernel sizes, and [a, 0] pads a
    with zero channels. For d = d_model, x W has 4 * d channels, and both convolutions have d / 2 output channels. A
    separable convolution is a depthwise convolution followed by a pointwise projection, both with biases.
    """

    kind = "evolved_encoder_conv"
    ordered = True
    norm: Norm = LayerNorm()
    bias: bool | None = False  # of W and conv_3; None: the default of the model's linear layers

    def build(self, site: Site) -> Branch:
        return EvolvedEncoderConvModule(self, site)


@dataclass(frozen=True, slots=True)
class EvolvedDecoderConv(BranchSpec):
    """The convolutions of an Evolved Transformer decoder block.

    h = norm(relu(separable_11(x)) + [separable_7(x), 0]), y = separable_7(h). Indices are kernel sizes, and [a, 0] pads
    a with zero channels. For d = d_model, the convolutions have 2 * d, d / 2 and d output channels.
    """

    kind = "evolved_decoder_conv"
    ordered = True
    norm: Norm = LayerNorm()

    def build(self, site: Site) -> Branch:
        return EvolvedDecoderConvModule(self, site)


def _half(site: Site) -> int:
    site.require(site.d_model >= 2, "kind", "one convolution has d_model / 2 channels, so d_model must be at least 2")
    return site.d_model // 2


class TwoConvolutions(Branch):
    """Abstract base class of branches with two convolutions in sequence. Decoding caches the past inputs of each."""

    def start(self, rows: Rows, ctx: Context) -> tuple[ActivationCache, ActivationCache]:  # noqa: ARG002
        return ActivationCache(rows), ActivationCache(rows)


class EvolvedEncoderConvModule(TwoConvolutions):
    def __init__(self, spec: EvolvedEncoderConv, site: Site) -> None:
        super().__init__()
        D, half = site.d_model, _half(site)
        self.first, self.second = kernel_extent(3, site), kernel_extent(9, site)
        self.left = site.linear(D, {"up": 4 * D}, bias=spec.bias)
        self.right = site.linear(3 * D, {"up": half}, bias=spec.bias)
        self.norm = spec.norm.build(site.inside("norm"), 4 * D)
        self.output = SeparableConvolution(4 * D, 9, "down", half, site)
        self.rest = (4 * D - half, D - half)
        self.dropout = nn.Dropout(site.activation_dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: tuple[ActivationCache, ActivationCache] | None = None
    ) -> Float[Tensor, "B T D"]:
        outer, inner = (None, None) if state is None else state
        left = self.dropout(F.relu(self.left(x)))
        window = windows(pad_stream(x, self.first, ctx.own, outer), self.first, ctx.own)
        right = self.dropout(F.relu(self.right(window)))
        h = self.norm(left + F.pad(right, (0, self.rest[0])))
        y = self.output(pad_stream(h, self.second, ctx.own, inner), other_segments(self.second, ctx.own))
        return F.pad(y, (0, self.rest[1]))


class EvolvedDecoderConvModule(TwoConvolutions):
    def __init__(self, spec: EvolvedDecoderConv, site: Site) -> None:
        super().__init__()
        D, half = site.d_model, _half(site)
        self.wide, self.narrow = kernel_extent(11, site), kernel_extent(7, site)
        self.left = SeparableConvolution(D, 11, "up", 2 * D, site)
        self.right = SeparableConvolution(D, 7, "up", half, site)
        self.norm = spec.norm.build(site.inside("norm"), 2 * D)
        self.output = SeparableConvolution(2 * D, 7, "down", D, site)
        self.rest = 2 * D - half
        self.dropout = nn.Dropout(site.activation_dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: tuple[ActivationCache, ActivationCache] | None = None
    ) -> Float[Tensor, "B T D"]:
        outer, inner = (None, None) if state is None else state
        stream = pad_stream(x, self.wide, ctx.own, outer)
        left = self.dropout(F.relu(self.left(stream, other_segments(self.wide, ctx.own))))
        right = self.right(_within(stream, self.wide, self.narrow), other_segments(self.narrow, ctx.own))
        h = self.norm(left + F.pad(self.dropout(right), (0, self.rest)))
        return self.output(pad_stream(h, self.narrow, ctx.own, inner), other_segments(self.narrow, ctx.own))


def _within(stream: Float[Tensor, "B N D"], wide: KernelExtent, narrow: KernelExtent) -> Float[Tensor, "B n D"]:
    """Crop `stream`, which is padded for the kernel `wide`, to the padding that the kernel `narrow` needs."""
    return stream[:, wide.left - narrow.left : stream.shape[1] - (wide.right - narrow.right)]


class SeparableConvolution(nn.Module):
    """A depthwise convolution and a pointwise projection, both with biases."""

    def __init__(self, d_in: int, width: int, role: Role, d_out: int, site: Site) -> None:
        super().__init__()
        self.filters = site.parameter(d_in, width, role="other")
        self.bias = nn.Parameter(torch.zeros(d_in))
        self.pointwise = site.linear(d_in, {role: d_out}, bias=True)

    def forward(
        self, stream: Float[Tensor, "B N W"], others: tuple[Bool[Tensor, "B T"], ...] | None
    ) -> Float[Tensor, "B T E"]:
        return self.pointwise(convolve(stream, self.filters.T, others) + self.bias)
