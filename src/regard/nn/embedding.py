"""The input layer for token ids: token embeddings plus position vectors."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.checks import check_above, check_not_negative, check_rate
from regard.nn.core import Site, build_optional
from regard.nn.input import Input, InputSpec, channels_left, check_join
from regard.nn.norm import NoNorm, Norm
from regard.nn.position.base import Additive, AdditiveTable
from regard.nn.vocab.tables import Table


@dataclass(frozen=True, slots=True)
class Sinusoidal(Additive):
    """Vaswani et al. 2017: sin(pos * w_k), cos(pos * w_k) with w_k = base^(-2k / d), k = 0 .. d/2 - 1 and width d.

    Other conventions: `start=1` counts k from 1 (COMP7607, CS 224n). `denominator="span"` divides k by d/2 - 1 instead
    of d/2, so that the last frequency is exactly 1 / base (tensor2tensor, fairseq). `layout="halves"` puts all sines
    before all cosines (Hugging Face Marian) instead of interleaving them.
    """

    kind = "sinusoidal"
    base: float = 10000.0
    start: Literal[0, 1] = 0
    denominator: Literal["width", "span"] = "width"
    layout: Literal["interleaved", "halves"] = "interleaved"
    offset: int = 0  # added to every position

    def check(self) -> None:
        check_above("base", self.base, 1)

    def build(self, site: Site, width: int) -> AdditiveTable:
        site.require(width % 2 == 0, "kind", f"sinusoids come in pairs and need an even width, not {width}")
        return SinusoidalModule(self, width)

    def frequencies(self, width: int, device: torch.device | None = None) -> Float[Tensor, " k"]:
        """Return the frequencies w_k in float64. In float32, products of large positions and w_k would be inexact."""
        k = torch.arange(self.start, self.start + width // 2, dtype=torch.float64, device=device)
        steps = {"width": width / 2, "span": max(width / 2 - 1, 1)}[self.denominator]
        return torch.exp(-math.log(self.base) * k / steps)

    def table(self, length: int, width: int, device: torch.device | None = None) -> Float[Tensor, "length width"]:
        """Return the position vectors of positions 0 .. length - 1, one per row."""
        return self.vectors(torch.arange(length, device=device), width)

    def vectors(self, positions: Int[Tensor, "*n"], width: int) -> Float[Tensor, "*n width"]:
        """Return the position vectors of `positions` in float64."""
        angles = (positions.double() + self.offset)[..., None] * self.frequencies(width, positions.device)
        return torch.stack((angles.sin(), angles.cos()), {"interleaved": -1, "halves": -2}[self.layout]).flatten(-2)


class SinusoidalModule(AdditiveTable):
    table: Tensor

    def __init__(self, spec: Sinusoidal, width: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width
        self.register_buffer("table", spec.table(2048, width).to(torch.get_default_dtype()), persistent=False)

    def forward(self, positions: Int[Tensor, "b T"], bound: int) -> Float[Tensor, "b T W"]:
        stored = bound <= self.table.shape[0]  # others are computed each time: no forward pass changes a module
        return self.table[positions] if stored else self.spec.vectors(positions, self.width).to(self.table)


@dataclass(frozen=True, slots=True)
class Tokens(InputSpec):
    """Token embeddings: dropout(norm(scale * E[id] + P[position] + token type embedding)).

    `join="concat"` appends P[position] as the last `position_width` channels instead of adding it (CS 182, choice 1).

    Word dropout (Iyyer et al. 2015): in training, each E[id] is set to 0 with probability `word_dropout`. The other
    embeddings are not rescaled, and position and type vectors are kept. Differs from the paper: a mean over tokens
    includes dropped tokens.
    """

    kind = "tokens"
    scaled: bool = True  # multiply E by sqrt(d_model), as in Vaswani et al. 2017
    position: Additive | None = Sinusoidal()
    join: Literal["add", "concat"] = "add"
    position_width: int | None = None  # only with join="concat"
    norm: Norm = NoNorm()
    types: int = 0  # number of token types, such as BERT's sentences A and B
    word_dropout: float = 0.0

    def check(self) -> None:
        check_join(self.join, self.position is not None, self.position_width)
        check_not_negative("types", self.types)
        check_rate("word_dropout", self.word_dropout)

    @property
    def token_types(self) -> int:
        return self.types

    def table_width(self, d_model: int) -> int:
        return channels_left(d_model, self.position_width)

    def build(self, site: Site) -> Input:
        return TokensModule(self, site)


class TokensModule(Input):
    def __init__(self, spec: Tokens, site: Site) -> None:
        super().__init__()
        width = {"add": site.d_model, "concat": spec.position_width or 0}[spec.join]
        self.position = build_optional(spec.position, site.inside("position"), width)
        self.types = site.parameter(spec.types, site.d_model, role="embedding") if spec.types else None
        self.norm, self.factor = spec.norm.build(site.inside("norm")), site.d_model**0.5 if spec.scaled else 1.0
        self.dropout, self.word_dropout = nn.Dropout(site.dropout), spec.word_dropout
        self.appended, self.site = spec.join == "concat", site

    def forward(
        self,
        values: Int[Tensor, "B T"],
        table: Table,
        positions: Int[Tensor, "b T"],
        bound: int,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        x = table(values)
        if self.training and self.word_dropout > 0.0:
            dropped = torch.rand(values.shape, dtype=torch.float32, device=values.device) < self.word_dropout
            x = x.masked_fill(dropped[..., None], 0.0)
        x = x * self.factor
        if self.position is not None:
            place = self.position(positions, bound).to(x.dtype)
            x = torch.cat((x, place.expand(x.shape[0], -1, -1)), -1) if self.appended else x + place
        if self.types is not None:  # without types in the batch, all tokens have type 0
            x = x + (self.types[0] if types is None else nn.functional.embedding(types, self.types))
        elif types is not None:
            raise self.site.error("types", "this input does not distinguish token types; drop them from the batch")
        return self.dropout(self.normalised(x))

    def normalised(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Return norm(x), where x is the sum of all embeddings."""
        return self.norm(x)
