"""Dropout on a CPU with fewer random bits than torch's dropout."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = 2**16  # number of values that a dropout probability can have


class BitDropout(nn.Dropout):
    """Dropout on a CPU with 16 random bits per element.

    torch draws a float per element. In a small model, this takes a fifth of the time spent outside matrix products.
    Here, the dropout probability is rounded to a multiple of 1 / 65,536. Elements that are not dropped are divided by
    one minus the rounded probability, so the expected value is exact.
    """

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        return bit_dropout(input, self.p) if self.training and self.p > 0.0 else input


def bit_dropout(x: Tensor, p: float) -> Tensor:
    """Apply dropout with probability p to x. On a CPU, 16 random bits per element are drawn."""
    kept = round((1 - p) * LEVELS)
    if x.is_cpu and 0 < kept < LEVELS and not torch.compiler.is_compiling():
        return x * _scaled_keep_mask(x, kept)
    return F.dropout(x, p, True)


@torch.no_grad()
def _scaled_keep_mask(x: Tensor, kept: int) -> Tensor:
    """Return a random mask. Each element is 1 / q with probability q = kept / 65,536, and otherwise 0."""
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64)
    bits.random_(torch.iinfo(torch.int64).min, None)  # all 64 bits; without bounds the sign would always be 0
    short = bits.view(torch.int16)[: x.numel()].view(x.shape)
    mask = torch.empty(x.shape, dtype=x.dtype)
    return torch.lt(short, kept - LEVELS // 2, out=mask).mul_(LEVELS / kept)
