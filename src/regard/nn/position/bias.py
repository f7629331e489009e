"""Attention biases that depend only on distance: learned scalars, T5 buckets, ALiBi."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.nn.checks import require
from regard.nn.core import Site
from regard.nn.mask import View
from regard.nn.position.base import Position, PositionTerms
from regard.nn.terms import Terms


@dataclass(frozen=True, slots=True)
class DistanceBias(Position):
    """A learned bias per head and per distance from query to key, clipped to +-max_distance (CS 182, 17.1.2)."""

    kind = "distance_bias"
    max_distance: int = 64

    def check(self) -> None:
        _check_positive("max_distance", self.max_distance)

    def build(self, site: Site) -> PositionTerms:
        return DistanceBiasModule(self.max_distance, site)


class DistanceBiasModule(PositionTerms):
    def __init__(self, max_distance: int, site: Site) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.weight = site.parameter(site.heads, 2 * max_distance + 1, role="position")

    def forward(self, view: View) -> Terms:  # noqa: ARG002
        return Terms(by_distance=self.bias)

    def bias(self, distance: Int[Tensor, "*n"]) -> Float[Tensor, "H *n"]:
        """Return the bias of each head at each distance (key position minus query position)."""
        return self.weight[:, distance.clamp(-self.max_distance, self.max_distance) + self.max_distance]


@dataclass(frozen=True, slots=True)
class T5Bias(Position):
    """Raffel et al. 2020: a learned bias per head and bucket of distances from query to key.

    Each short distance has its own bucket. Longer distances share buckets of logarithmic width. A bidirectional stack
    uses half of the buckets for each direction. A causal stack uses all of them for earlier keys.
    """

    kind = "t5_bias"
    buckets: int = 32
    max_distance: int = 128

    def check(self) -> None:
        require(self.buckets >= 4 and self.buckets % 4 == 0, "buckets", f"must be a multiple of 4, not {self.buckets}")
        require(
            self.max_distance > self.buckets // 2,
            "max_distance",
            f"must exceed half of the {self.buckets} buckets, not {self.max_distance}",
        )

    def build(self, site: Site) -> PositionTerms:
        return T5BiasModule(self, site)

    def bucket(self, distance: Int[Tensor, "*n"], causal: bool) -> Int[Tensor, "*n"]:
        """Return the bucket of each distance (key position minus query position)."""
        if causal:
            buckets, first, far = self.buckets, 0, (-distance).clamp(min=0)
        else:
            buckets = self.buckets // 2
            first, far = (distance > 0).long() * buckets, distance.abs()
        exact = buckets // 2
        # The same order of operations as in T5's code: another order rounds some distances to the next bucket.
        share = (far.float() / exact).clamp(min=1.0).log() / math.log(self.max_distance / exact)
        coarse = exact + (share * (buckets - exact)).long()
        return first + torch.where(far < exact, far, coarse.clamp(max=buckets - 1))


class T5BiasModule(PositionTerms):
    def __init__(self, spec: T5Bias, site: Site) -> None:
        super().__init__()
        self.spec, self.causal = spec, site.causal and not site.sees_ahead
        self.weight = site.parameter(site.heads, spec.buckets, role="position")

    def forward(self, view: View) -> Terms:  # noqa: ARG002
        return Terms(by_distance=self.bias)

    def bias(self, distance: Int[Tensor, "*n"]) -> Float[Tensor, "H *n"]:
        """Return the bias of each head at each distance (key position minus query position)."""
        return self.weight[:, self.spec.bucket(distance, self.causal)]


@dataclass(frozen=True, slots=True)
class ALiBi(Position):
    """Press et al. 2022: score - m_h * |i - j|, with the constant slope m_h = 2^(-8h / H) in head h of H.

    If H is not a power of two, the slopes are those for the next smaller power of two, followed by every second slope
    for the next larger one, as in the paper's code. `slopes` replaces these constants, for example by those of the
    heads that remain after pruning.
    """

    kind = "alibi"
    slopes: tuple[float, ...] | None = None  # one per head; None: the slopes of the paper

    def build(self, site: Site) -> PositionTerms:
        slopes = alibi_slopes(site.heads) if self.slopes is None else list(self.slopes)
        site.require(
            len(slopes) == site.heads, "slopes", f"there are {len(slopes)} slopes for {site.heads} heads; give one each"
        )
        return ALiBiModule(slopes)


class ALiBiModule(PositionTerms):
    slopes: Tensor

    def __init__(self, slopes: list[float]) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)

    def forward(self, view: View) -> Terms:  # noqa: ARG002
        return Terms(by_distance=self.bias)

    def bias(self, distance: Int[Tensor, "*n"]) -> Float[Tensor, "H *n"]:
        """Return the bias of each head at each distance (key position minus query position)."""
        return -self.slopes.view(-1, *[1] * distance.dim()) * distance.abs()


def alibi_slopes(heads: int) -> list[float]:
    """Return the ALiBi slopes m_1, ..., m_H, where H is `heads`."""
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-4.0 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]


def _check_positive(name: str, value: int) -> None:
    require(value >= 1, name, f"must be at least 1, not {value}")
