"""Rotary position embeddings (RoPE)."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regard.nn.checks import check_above
from regard.nn.core import Site
from regard.nn.mask import View
from regard.nn.position.base import Position, PositionTerms, query_positions
from regard.nn.terms import Terms


@dataclass(frozen=True, slots=True)
class Rotary(Position):
    """Su et al. 2021: rotate channel pair k of each query and key by the angle pos * base^(-2k / d_head).

    Products q.k then depend on positions only through i - j. Pair k has the channels k and k + d_head / 2, as in
    GPT-NeoX and Llama. Keys are rotated before they are cached.
    """

    kind = "rotary"
    shaped_by = ("d_head",)
    scores_pairs = False
    base: float = 10000.0

    def check(self) -> None:
        check_above("base", self.base, 1)

    def build(self, site: Site) -> PositionTerms:
        site.require(
            site.d_head % 2 == 0,
            "kind",
            f"rotary rotates pairs of channels and needs an even d_head, not {site.d_head}",
        )
        return RotaryModule(site.d_head, self.base)


class RotaryModule(PositionTerms):
    bits: Tensor

    def __init__(self, d_head: int, base: float) -> None:
        super().__init__()
        self.dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        exponents = torch.arange(0, d_head, 2, dtype=torch.float64) / d_head
        # Stored as integers, which `model.to(torch.bfloat16)` does not round: in bfloat16, 257 becomes 256.
        bits = (base**-exponents).to(self.dtype).view(torch.int64 if self.dtype == torch.float64 else torch.int32)
        self.register_buffer("bits", bits, persistent=False)

    def forward(self, view: View) -> Terms:
        frequencies = self.bits.view(self.dtype)
        places = query_positions(view.mask, view.T, view.device)
        angles = places[:, None, :, None].to(self.dtype) * frequencies  # (b, 1, T, K/2)
        angles = torch.cat((angles, angles), -1)
        return Terms(rotation=partial(rotate, cos=angles.cos(), sin=angles.sin()))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_k, x_{k + d/2}) of the d channels of x by an angle, given as `cos` and `sin`."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).type_as(x)
