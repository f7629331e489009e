"""Taps: what a convolution reads around each position of the stream, in one pass or step by step."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.nn.attention import once
from regard.nn.core import Site
from regard.nn.mask import View
from regard.nn.state import ActivationCache, ConvolutionCache


class Taps(NamedTuple):
    """A convolution reads positions t - before, t - before + step, .. t + after for position t."""

    before: int
    after: int
    step: int = 1  # the dilation

    def places(self) -> range:
        """Where the taps stand, counted from the first."""
        return range(0, self.before + self.after + 1, self.step)


def taps(width: int, site: Site, step: int = 1) -> Taps:
    """As many taps as `width`: up to t where no later token may be read, else around t.

    Of an even number, one more stands behind t than before it.
    """
    if site.causal:
        return Taps((width - 1) * step, 0, step)
    return Taps((width - 1) // 2 * step, width // 2 * step, step)


def receptive_field(layers: Iterable[tuple[int, int]]) -> int:
    """How many inputs one output of convolutions (kernel, dilation) on top of each other depends on.

    1 + sum_l (k_l - 1) * d_l: 1 + L (k - 1) for L plain layers. A causal one has all but one of them in the past.
    """
    return 1 + sum((kernel - 1) * dilation for kernel, dilation in layers)


def read(
    x: Float[Tensor, "B T D"], taps: Taps, view: View, past: ActivationCache | None = None
) -> Float[Tensor, "B N D"]:
    """The stream from `before` places before its first token to `after` places behind its last; zeros are not there.

    Nor is padding. In decoding, what came before is in `past`, which remembers what is new.
    """
    if past is not None:
        whole = past.append(x)
        first = view.mask.positions(view.T, view.S, view.device)[0][:, :1]
        at = first + torch.arange(-taps.before, x.shape[1], device=x.device)
        row = torch.arange(x.shape[0], device=x.device)[:, None]
        return whole[row, at.clamp(min=0)].masked_fill((at < 0)[:, :, None], 0.0)
    # Padding stands at the end of a row, where only a tap behind a real token reads it.
    if taps.after and view.mask.k_seg is not None:
        x = x.masked_fill((view.mask.k_seg == 0)[:, :, None], 0.0)
    return F.pad(x, (0, 0, taps.before, taps.after))


def foreign(taps: Taps, view: View) -> tuple[Bool[Tensor, "B T"], ...] | None:
    """For every tap, where it reads another segment of a packed row; None if no row is packed."""
    return once(view.shared, ("foreign", taps), lambda: _foreign(taps, view)) if view.mask.packed else None


def _foreign(taps: Taps, view: View) -> tuple[Tensor, ...]:
    own, seg = view.mask.q_seg, view.mask.k_seg
    assert own is not None
    assert seg is not None
    seg = F.pad(seg, (taps.before, taps.after))
    return tuple(seg[:, i : i + view.T] != own for i in taps.places())


def windows(
    x: Float[Tensor, "B T D"],
    taps: Taps,
    view: View,
    ring: ConvolutionCache | None = None,
    counts: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T W"]:
    """What the taps of every position read, side by side: (B, T, K * D). A convolution is a projection of this.

    Taps read zeros beyond the row and its segment. In decoding, what came before is in `ring`, which remembers the
    `counts` (None: all) of the new ones that are real.
    """
    if ring is not None:
        return ring.read(x, counts)
    if not taps.before and not taps.after:
        return x
    T, stream, hidden = x.shape[1], read(x, taps, view), foreign(taps, view)
    parts = [stream[:, i : i + T] for i in taps.places()]
    if hidden is not None:
        parts = [part.masked_fill(there[:, :, None], 0.0) for part, there in zip(parts, hidden, strict=True)]
    return torch.cat(parts, -1)


def convolve(
    stream: Float[Tensor, "B N D"],
    filters: Float[Tensor, "*r K H"],
    foreign: tuple[Bool[Tensor, "B T"], ...] | None = None,
) -> Float[Tensor, "B T D"]:
    """y_t = sum_i filter_i x_(t + i), channel by channel; the D / H channels of a head share its filter.

    Filters are the same for all positions, (K, H), or each position has its own, (B, T, K, H). Tap by tap, so that no
    window is ever copied.
    """
    K, H = filters.shape[-2:]
    T = stream.shape[1] - K + 1
    heads = stream.unflatten(-1, (H, -1))
    y = heads.new_zeros(())
    for i, weight in enumerate(filters.unbind(-2)):
        part = weight[..., None] * heads[:, i : i + T]
        y = y + (part if foreign is None else part.masked_fill(foreign[i][:, :, None, None], 0.0))
    return y.flatten(-2)
