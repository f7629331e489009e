"""Lightweight and dynamic convolutions, which replace self-attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.branches.base import BranchSpec
from regard.nn.cache import ActivationCache, Rows
from regard.nn.causal_convolution import convolve, kernel_extent, other_segments, pad_stream
from regard.nn.checks import MOST_HEADS, MOST_TAPS, check_count, require
from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.precision import widen


@dataclass(frozen=True, slots=True)
class LightConv(BranchSpec):
    """Lightweight convolution of Narang et al. 2021: depthwise, with filters normalised by softmax.

    g = (x W_a + a) * sigmoid(x W_b + b), y_t = sum_i softmax(k)_i * g_(t+i) + c. The output is (y W_p + p) W_o + o.
    Each channel has a filter k, which is the same at every position t. Filters are centred on t, or end at t in a
    causal stack. `SharedLightConv` is the original convolution of Wu et al. 2019.
    """

    kind = "light_conv"
    ordered = True
    width: int = 9
    bias: bool = True

    def check(self) -> None:
        _check_width(self.width)

    def build(self, site: Site) -> Branch:
        return ConvolutionModule(
            self.width, self.bias, LearnedFilters(self.width, site.d_model, site), TwoProjections(self.bias, site), site
        )


@dataclass(frozen=True, slots=True)
class DynamicConv(BranchSpec):
    """Dynamic convolution of Narang et al. 2021: `LightConv` with filters predicted for each channel and position.

    The filters at position t are k_t = g_t W_k + b_k, where W_k maps d_model to `width` * d_model channels.
    `SharedDynamicConv` is the original convolution of Wu et al. 2019.
    """

    kind = "dynamic_conv"
    ordered = True
    width: int = 9
    bias: bool = True

    def check(self) -> None:
        _check_width(self.width)

    def build(self, site: Site) -> Branch:
        filters = PredictedFilters(self.width, site.d_model, self.bias, site)
        return ConvolutionModule(self.width, self.bias, filters, TwoProjections(self.bias, site), site)


@dataclass(frozen=True, slots=True)
class SharedLightConv(BranchSpec):
    """Lightweight convolution of Wu et al. 2019: depthwise, with one filter for the d_model / heads channels of a head.

    g = (x W_a + a) * sigmoid(x W_b + b), y_t = sum_i softmax(k_h)_i * g_(t+i) with the filter k_h of head h. The output
    is y W_o + o. DropConnect zeroes filter weights with the attention dropout probability.
    """

    kind = "shared_light_conv"
    ordered = True
    width: int = 7
    heads: int | None = None  # None: as in the model
    bias: bool | None = None  # None: the default of the model's linear layers

    def check(self) -> None:
        _check_width(self.width)
        check_count("heads", self.heads, MOST_HEADS)

    def build(self, site: Site) -> Branch:
        filters = LearnedFilters(self.width, _heads(self.heads, site), site)
        return ConvolutionModule(self.width, self.bias, filters, _output(self.bias, site), site)


@dataclass(frozen=True, slots=True)
class SharedDynamicConv(BranchSpec):
    """Dynamic convolution of Wu et al. 2019: `SharedLightConv` with filters predicted at each position.

    The filters at position t are k_t = g_t W_k, where W_k maps d_model to `width` * heads channels.
    """

    kind = "shared_dynamic_conv"
    ordered = True
    width: int = 7
    heads: int | None = None  # None: as in the model
    bias: bool | None = None  # None: the default of the model's linear layers

    def check(self) -> None:
        _check_width(self.width)
        check_count("heads", self.heads, MOST_HEADS)

    def build(self, site: Site) -> Branch:
        filters = PredictedFilters(self.width, _heads(self.heads, site), False, site)
        return ConvolutionModule(self.width, self.bias, filters, _output(self.bias, site), site)


def _check_width(width: int) -> None:
    require(width > 0 and width % 2 == 1, "width", f"must be odd, so that the filter is symmetric, not {width}")
    check_count("width", width, MOST_TAPS)


def _heads(heads: int | None, site: Site) -> int:
    heads = heads or site.heads
    site.require(
        site.d_model % heads == 0, "heads", f"{heads} heads do not divide d_model {site.d_model}; choose a divisor"
    )
    return heads


def _output(bias: bool | None, site: Site) -> nn.Module:
    return site.linear(site.d_model, {"attend_out": site.d_model}, bias=bias)


class ConvolutionModule(Branch):
    """A gated linear unit, a depthwise convolution with softmax-normalised filters, and an output module."""

    def __init__(self, width: int, bias: bool | None, filters: nn.Module, output: nn.Module, site: Site) -> None:
        super().__init__()
        self.extent = kernel_extent(width, site)
        self.gated = site.linear(site.d_model, {"value": site.d_model, "gate": site.d_model}, bias=bias)
        self.filters = filters
        self.output = output
        self.dropout = nn.Dropout(site.attention_dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: ActivationCache | None = None
    ) -> Float[Tensor, "B T D"]:
        g = F.glu(self.gated(x), -1)
        weights = widen(self.filters(g)).softmax(-2).to(g.dtype)
        if self.training and self.dropout.p > 0.0:  # each position has its own dropout mask
            weights = self.dropout(weights.expand(*g.shape[:2], -1, -1))
        stream = pad_stream(g, self.extent, ctx.own, state)
        return self.output(convolve(stream, weights, other_segments(self.extent, ctx.own)))

    def start(self, rows: Rows, ctx: Context) -> ActivationCache:  # noqa: ARG002
        return ActivationCache(rows)


class LearnedFilters(nn.Module):
    """Learned filters, which are the same at every position."""

    def __init__(self, width: int, heads: int, site: Site) -> None:
        super().__init__()
        self.weight = site.parameter(heads, width, role="other")

    def forward(self, g: Float[Tensor, "B T D"]) -> Float[Tensor, "K H"]:  # noqa: ARG002
        return self.weight.T


class PredictedFilters(nn.Module):
    """Filters that a linear projection predicts from the input at each position."""

    def __init__(self, width: int, heads: int, bias: bool, site: Site) -> None:
        super().__init__()
        self.width = width
        self.predict = site.linear(site.d_model, {"other": width * heads}, bias=bias)

    def forward(self, g: Float[Tensor, "B T D"]) -> Float[Tensor, "B T K H"]:
        return self.predict(g).unflatten(-1, (self.width, -1))


class TwoProjections(nn.Module):
    """Bias c, pointwise projection W_p and output projection W_o after a convolution: ((y + c) W_p + p) W_o + o."""

    def __init__(self, bias: bool, site: Site) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(site.d_model)) if bias else None
        self.pointwise = site.linear(site.d_model, {"other": site.d_model}, bias=bias)
        self.output = _output(bias, site)

    def forward(self, y: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.output(self.pointwise(y if self.bias is None else y + self.bias))
