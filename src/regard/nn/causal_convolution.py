"""Convolutions over tokens (causal in a decoder), for whole sequences or one decoding step at a time."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.nn.attention import cached
from regard.nn.cache import ActivationCache, ConvolutionCache
from regard.nn.core import Site
from regard.nn.mask import View


class KernelExtent(NamedTuple):
    """The inputs that a convolution reads for position t: those at t - left, t - left + dilation, ..., t + right."""

    left: int
    right: int
    dilation: int = 1

    def offsets(self) -> range:
        """Return the offset of each filter tap from the leftmost tap, in tokens."""
        return range(0, self.left + self.right + 1, self.dilation)


def kernel_extent(kernel_size: int, site: Site, dilation: int = 1) -> KernelExtent:
    """Return the extent of a kernel that ends at position t in a causal stack, and is centred on t otherwise.

    A centred kernel of even size has its additional tap on the right.
    """
    if site.causal:
        return KernelExtent((kernel_size - 1) * dilation, 0, dilation)
    return KernelExtent((kernel_size - 1) // 2 * dilation, kernel_size // 2 * dilation, dilation)


def receptive_field(layers: Iterable[tuple[int, int]]) -> int:
    """Return the receptive field of stacked convolutions, given as pairs (kernel size, dilation).

    With kernel sizes k_l and dilations d_l, it is 1 + sum_l (k_l - 1) * d_l.
    """
    return 1 + sum((kernel_size - 1) * dilation for kernel_size, dilation in layers)


def pad_stream(
    x: Float[Tensor, "B T D"], extent: KernelExtent, view: View, cache: ActivationCache | None = None
) -> Float[Tensor, "B N D"]:
    """Return x padded with zeros at both ends, for a convolution with T outputs. Padding tokens become zeros.

    In decoding, the inputs on the left come from `cache` instead, and x is stored in `cache`.
    """
    if cache is not None:
        past = cache.append(x)
        first = view.mask.positions(view.T, view.S, view.device)[0][:, :1]
        at = first + torch.arange(-extent.left, x.shape[1], device=x.device)
        row = torch.arange(x.shape[0], device=x.device)[:, None]
        return past[row, at.clamp(min=0)].masked_fill((at < 0)[:, :, None], 0.0)
    # Padding tokens are at the end of a batch row, so a causal convolution of real tokens never reads them.
    if extent.right and view.mask.k_seg is not None:
        x = x.masked_fill((view.mask.k_seg == 0)[:, :, None], 0.0)
    return F.pad(x, (0, 0, extent.left, extent.right))


def other_segments(extent: KernelExtent, view: View) -> tuple[Bool[Tensor, "B T"], ...] | None:
    """Return a mask per filter tap, True where it reads another text of the row, or None if rows are not packed."""
    if not view.mask.packed:
        return None
    return cached(view.shared, ("other_segments", extent), lambda: _other_segments(extent, view))


def _other_segments(extent: KernelExtent, view: View) -> tuple[Tensor, ...]:
    own, seg = view.mask.q_seg, view.mask.k_seg
    assert own is not None
    assert seg is not None
    seg = F.pad(seg, (extent.left, extent.right))
    return tuple(seg[:, i : i + view.T] != own for i in extent.offsets())


def windows(stream: Float[Tensor, "B N D"], extent: KernelExtent, view: View) -> Float[Tensor, "B T W"]:
    """Return the inputs under the K filter taps of every position, concatenated to W = K * D channels.

    Inputs from other texts (segments) of a packed batch row are zeros.
    """
    taps = [stream[:, i : i + view.T] for i in extent.offsets()]
    others = other_segments(extent, view)
    if others is not None:
        taps = [tap.masked_fill(other[:, :, None], 0.0) for tap, other in zip(taps, others, strict=True)]
    return torch.cat(taps, -1)


def unfold(
    x: Float[Tensor, "B T D"],
    extent: KernelExtent,
    view: View,
    cache: ConvolutionCache | None = None,
    counts: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T W"]:
    """Return the windows of x (im2col). A convolution is a linear projection of these windows.

    In decoding, earlier inputs come from `cache`. The first `counts` new inputs of each batch row (by default all) are
    stored in `cache`.
    """
    if cache is not None:
        return cache.unfold(x, counts)
    if not extent.left and not extent.right:
        return x
    return windows(pad_stream(x, extent, view), extent, view)


def convolve(
    stream: Float[Tensor, "B N D"],
    filters: Float[Tensor, "*r K H"],
    others: tuple[Bool[Tensor, "B T"], ...] | None = None,
) -> Float[Tensor, "B T D"]:
    """Return the depthwise convolution y_t = sum_i filter_i * x_(t + i). The D / H channels of a head share a filter.

    Filters have shape (K, H) if all positions share them, or (B, T, K, H) if each position has its own. The sum runs
    tap by tap, without a copy of the windows. Inputs marked in `others`, one mask per tap, contribute zero.
    """
    K, H = filters.shape[-2:]
    T = stream.shape[1] - K + 1
    heads = stream.unflatten(-1, (H, -1))
    y = heads.new_zeros(())
    for i, weight in enumerate(filters.unbind(-2)):
        part = weight[..., None] * heads[:, i : i + T]
        y = y + (part if others is None else part.masked_fill(others[i][:, :, None, None], 0.0))
    return y.flatten(-2)
