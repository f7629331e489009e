"""Relative position representations (Shaw et al. 2018)."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.nn.checks import check_count
from regard.nn.core import Site
from regard.nn.mask import View
from regard.nn.position.base import Position, PositionTerms, positions_of
from regard.nn.terms import Terms


@dataclass(frozen=True, slots=True)
class Shaw(Position):
    """Shaw et al. 2018: score q_i . (k_j + a_{j-i}) and output sum_j w_ij * (v_j + c_{j-i}), with attention weights w.

    Distances j - i are clipped to +-max_distance. The heads share the vectors a and c. For separate vectors in each
    layer, as in the paper, set `position` in the attention branch. The term c (`values`) needs the attention weights.
    Fused kernels do not return these weights, so attention with this term is not fused.
    """

    kind = "shaw"
    shaped_by = ("d_head", "d_value")
    max_distance: int = 16
    values: bool = True

    def check(self) -> None:
        check_count("max_distance", self.max_distance)

    def build(self, site: Site) -> PositionTerms:
        return ShawModule(self, site)


class ShawModule(PositionTerms):
    def __init__(self, spec: Shaw, site: Site) -> None:
        super().__init__()
        self.max_distance = spec.max_distance
        rows = 2 * spec.max_distance + 1
        self.keys = site.parameter(rows, site.d_head, role="position")
        self.values: nn.Parameter | None = site.parameter(rows, site.d_value, role="position") if spec.values else None

    def forward(self, view: View) -> Terms:
        index = positions_of(view).distances().clamp(-self.max_distance, self.max_distance) + self.max_distance
        rows = self.keys.shape[0]

        def content(q: Tensor) -> Tensor:  # (B, H, T, K) -> (B, H, T, S), without a tensor of size T x S x K
            return (q @ self.keys.T).gather(-1, _over_heads(index, q))

        def context(weights: Tensor) -> Tensor:  # (B, H, T, S) -> (B, H, T, V): sums weights per distance first
            assert self.values is not None
            by_distance = torch.zeros(*weights.shape[:-1], rows, dtype=weights.dtype, device=weights.device)
            by_distance = by_distance.scatter_add(-1, _over_heads(index, weights), weights)
            return by_distance.to(self.values.dtype) @ self.values

        return Terms(content=content, context=None if self.values is None else context)


def _over_heads(index: Int[Tensor, "b T S"], like: Tensor) -> Int[Tensor, "B H T S"]:
    return index[:, None].expand(like.shape[0], like.shape[1], -1, -1)
