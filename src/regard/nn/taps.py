"""Taps: what a convolution reads around each position of the stream, in one pass or step by step."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.nn.core import Site, View
from regard.nn.kernels import once
from regard.nn.state import Past


class Taps(NamedTuple):
    """A convolution reads positions t - before .. t + after for position t."""

    before: int
    after: int


def taps(width: int, site: Site) -> Taps:
    """As many taps as `width`, an odd number: up to t where no later token may be read, else around t."""
    return Taps(width - 1, 0) if site.causal else Taps(width // 2, width // 2)


def read(x: Float[Tensor, "B T D"], taps: Taps, view: View, past: Past | None = None) -> Float[Tensor, "B N D"]:
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
    return tuple(seg[:, i : i + view.T] != own for i in range(taps.before + taps.after + 1))


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
