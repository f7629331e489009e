"""The law of positions finds what ignores a position, and what tells order without saying so."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import SpecError
from regard.nn.attention import attend, merge_heads, split_heads
from regard.nn.attention_heads import attention_weights
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import KVCache, Rows
from regard.nn.core import Branch, Site
from regard.nn.embedding import Tokens
from regard.nn.mask import Context, View
from regard.nn.position.base import Additive, AdditiveTable, Position, PositionTerms
from regard.nn.position.rotary import Rotary
from regard.nn.stacks.plain import Plain
from regard.nn.terms import Terms
from regard.testing import LAWS, Report, check, examine, tiny
from regard.tree import swap

from .conftest import unchecked


@dataclass(frozen=True, slots=True)
class Planted(BranchSpec):
    """Self-attention that is right; or in all but this, that it takes no notice of a rotation and an offset."""

    kind = "planted_attention"
    attends = True
    heeds: bool = False

    def build(self, site: Site) -> Branch:
        return _Attention(site, self.heeds)


class _Attention(Branch):
    def __init__(self, site: Site, heeds: bool) -> None:
        super().__init__()
        self.heads, self.heeds, width = site.heads, heeds, site.heads * site.d_head
        self.qkv = site.linear(site.d_model, {"query": width, "key": width, "value": width})
        self.out = site.linear(width, {"attend_out": site.d_model})
        self.name = f"{site.side}.self"

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: KVCache | None = None) -> Float[Tensor, "B T D"]:
        terms = ctx.own.terms if self.heeds and ctx.own.terms is not None else Terms()
        parts = self.qkv(x).chunk(3, -1)
        if terms.offset is not None:
            parts = tuple(part + terms.offset for part in parts)
        q, k, v = (split_heads(part, self.heads) for part in parts)
        if terms.rotation is not None:
            q, k = terms.rotation(q), terms.rotation(k)
        if state is not None:
            k, v = state.append(k, v)
        if ctx.trace is not None:
            ctx.trace.add(self.name, attention_weights(q, k, ctx.own, 0.5))
        return self.out(merge_heads(attend(q, k, v, ctx.own, scale=0.5)))

    def start(self, rows: Rows, ctx: Context) -> KVCache:
        return KVCache(rows)


def outcomes(report: Report) -> dict[tuple[str, str], str]:
    return {(verdict.law, verdict.model): verdict.outcome for verdict in report.verdicts}


def test_an_attention_that_ignores_rotation_is_broken() -> None:
    """All other laws hold for it, which is how it was missed."""
    laws = [law for law in LAWS if law not in ("compile", "kernels")]
    with unchecked():
        found = outcomes(check(Planted(), laws))
    broken = {where for where, outcome in found.items() if outcome == "broken"}
    schemes, families = ("rotary", "injected"), ("decoder_only", "masked_lm")
    assert broken == {(f"positions ({scheme})", family) for scheme in schemes for family in families}
    assert found["positions (distance_bias)", "masked_lm"] == found["positions (shaw)", "decoder_only"] == "kept"
    assert {verdict.outcome for verdict in check(Planted(heeds=True), ["positions"]).verdicts} == {"kept"}


def test_the_message_names_the_position_and_what_to_do() -> None:
    detail = next(v.detail for v in check(Planted(), ["positions"]).broken if v.model == "masked_lm")
    assert "'rotary'" in detail
    assert "view.terms" in detail


@dataclass(frozen=True, slots=True)
class Shift(BranchSpec):
    """Reads the token before, and does not say that order matters."""

    kind = "planted_shift"

    def build(self, site: Site) -> Branch:
        return _Shift(site)


class _Shift(Branch):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self.project = site.linear(site.d_model, {"other": site.d_model})

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        return self.project(torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def test_a_branch_that_depends_on_order_must_declare_it() -> None:
    found = outcomes(check(Shift(), ["positions"]))
    assert found["positions (none)", "masked_lm"] == "broken"


@dataclass(frozen=True, slots=True)
class Empty(Position):
    """Contributes nothing."""

    kind = "planted_empty"

    def build(self, site: Site) -> PositionTerms:
        return _Empty()


class _Empty(PositionTerms):
    def forward(self, view: View) -> Terms:
        return Terms()


@dataclass(frozen=True, slots=True)
class Zeros(Additive):
    """The same vector everywhere."""

    kind = "planted_zeros"

    def build(self, site: Site, width: int) -> AdditiveTable:
        return _Zeros(width)


class _Zeros(AdditiveTable):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, positions: Int[Tensor, "b T"], bound: int) -> Float[Tensor, "b T W"]:
        return torch.zeros(*positions.shape, self.width)


@pytest.mark.parametrize("part", [Empty(), Zeros()])
def test_a_position_without_effect_breaks_the_law(part: Position | Additive) -> None:
    assert set(outcomes(check(part, ["positions"])).values()) == {"broken"}


@pytest.mark.parametrize("family", ["masked_lm", "encoder_decoder", "token_classifier", "sentence_classifier"])
def test_an_encoder_without_positions_ignores_order(family: str) -> None:
    """And with them it does: the law holds both ways because the answers differ."""
    spec = tiny.families()[family]
    bare = swap(spec, Tokens, lambda tokens: replace(tokens, position=None))
    turned = swap(bare, Plain, lambda stack: replace(stack, position=Rotary()))
    side = "source" if spec.reads_source else "target"
    assert tiny.order(tiny.streams(bare)[side], causal=False) == (None, False)
    assert tiny.order(tiny.streams(turned)[side], causal=False)[0] == "rotary"
    for model in (spec, bare, turned):
        assert examine(family, model, ["positions"])[0].outcome == "kept"


@dataclass(frozen=True, slots=True)
class Never(BranchSpec):
    kind = "planted_never"

    def build(self, site: Site) -> Branch:
        raise site.error("", "cannot be built")


def test_a_part_that_is_never_built_is_an_error() -> None:
    """What is refused beside other positions does not apply; what is refused everywhere was not examined."""
    with pytest.raises(SpecError, match="no model could be built around Never"):
        check(Never)
