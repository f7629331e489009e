"""Vectors per position: sinusoids and learned tables, and their injection into queries, keys and values."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.mask import Terms, View
from regard.nn.position.base import Additive, AdditiveTable, Position, PositionTerms, places


@dataclass(frozen=True, slots=True)
class Sinusoidal(Additive):
    """Vaswani et al. 2017: sin(pos * w_k), cos(pos * w_k) with w_k = base^(-2k / d), k = 0 .. d/2 - 1.

    Three conventions are in use. `start=1` counts k from 1, as COMP7607 and CS 224n print it. `denominator="span"`
    divides by d/2 - 1 so that the last frequency is exactly 1 / base (tensor2tensor, fairseq). `layout="halves"` puts
    all sines before all cosines (Hugging Face Marian) instead of interleaving them.
    """

    kind = "sinusoidal"
    base: float = 10000.0
    start: Literal[0, 1] = 0
    denominator: Literal["width", "span"] = "width"
    layout: Literal["interleaved", "halves"] = "interleaved"
    offset: int = 0  # added to every position

    def check(self) -> None:
        if self.base <= 1.0:
            raise SpecError("base", f"must be above 1, not {self.base}")

    def build(self, site: Site, width: int) -> AdditiveTable:
        if width % 2:
            raise site.error("kind", f"sinusoids come in pairs and need an even width, not {width}")
        return SinusoidalModule(self, width)

    def frequencies(self, width: int, device: torch.device | None = None) -> Float[Tensor, " k"]:
        """w_k in float64: the float32 product of a large position and a rounded frequency drifts."""
        k = torch.arange(self.start, self.start + width // 2, dtype=torch.float64, device=device)
        steps = width / 2 if self.denominator == "width" else max(width / 2 - 1, 1)
        return torch.exp(-math.log(self.base) * k / steps)

    def table(self, length: int, width: int, device: torch.device | None = None) -> Float[Tensor, "length width"]:
        """The vectors of positions 0 .. length - 1."""
        places = torch.arange(self.offset, self.offset + length, dtype=torch.float64, device=device)
        angles = places[:, None] * self.frequencies(width, device)
        waves = (angles.sin(), angles.cos())
        return torch.stack(waves, -1).flatten(-2) if self.layout == "interleaved" else torch.cat(waves, -1)


class SinusoidalModule(AdditiveTable):
    table: Tensor

    def __init__(self, spec: Sinusoidal, width: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width
        self.register_buffer("table", spec.table(2048, width).to(torch.get_default_dtype()), persistent=False)

    def forward(self, positions: Int[Tensor, "b T"], bound: int) -> Float[Tensor, "b T W"]:
        # Longer sequences are rare and compute their own table: no forward pass mutates a module.
        table = (
            self.table
            if bound <= self.table.shape[0]
            else self.spec.table(bound, self.width, self.table.device).to(self.table)
        )
        return table[positions]


@dataclass(frozen=True, slots=True)
class Learned(Additive):
    """One trained vector per position, up to `max_len` of them (Gehring et al. 2017, BERT, GPT-2)."""

    kind = "learned"
    max_len: int = 512

    def check(self) -> None:
        if self.max_len < 1:
            raise SpecError("max_len", f"must be at least 1, not {self.max_len}")

    def build(self, site: Site, width: int) -> AdditiveTable:
        return LearnedModule(self.max_len, width, site)


class LearnedModule(AdditiveTable):
    def __init__(self, max_len: int, width: int, site: Site) -> None:
        super().__init__()
        self.weight = site.parameter(max_len, width, role="position")
        self.site = site

    def forward(self, positions: Int[Tensor, "b T"], bound: int) -> Float[Tensor, "b T W"]:
        length = self.weight.shape[0]
        if bound > length:
            raise self.site.error(
                "max_len", f"a sequence of {bound} tokens is longer than the {length} positions learned"
            )
        return nn.functional.embedding(positions, self.weight)


@dataclass(frozen=True, slots=True)
class Injected(Position):
    """q + p_i, k + p_j, v + p_j in every layer: CS 224n's formula, which differs from adding p to the input.

    The two agree when p is multiplied by the projections first.
    """

    kind = "injected"
    shaped_by = ("heads", "kv_heads", "d_head", "d_value")
    table: Additive = Sinusoidal()

    def build(self, site: Site) -> PositionTerms:
        if site.d_head != site.d_value:
            raise site.error(
                "kind", f"the same vector joins keys and values, but d_head is {site.d_head} and d_value {site.d_value}"
            )
        return InjectedModule(self.table.build(site.inside("table"), site.heads * site.d_head))


class InjectedModule(PositionTerms):
    def __init__(self, table: AdditiveTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, view: View) -> Terms:
        at = places(view)
        return Terms(offset=self.table(at.q, at.bound))
