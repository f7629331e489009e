"""The law `positions` finds parts that ignore positions, and parts that use token order without declaring it."""

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
    """Self-attention that, unless `uses_terms`, ignores the rotation and the offset of a position scheme."""

    kind = "planted_attention"
    attends = True
    uses_terms: bool = False

    def build(self, site: Site) -> Branch:
        return _Attention(site, self.uses_terms)


class _Attention(Branch):
    def __init__(self, site: Site, uses_terms: bool) -> None:
        super().__init__()
        self.heads, self.uses_terms, width = site.heads, uses_terms, site.heads * site.d_head
        self.qkv = site.linear(site.d_model, {"query": width, "key": width, "value": width})
        self.out = site.linear(width, {"attend_out": site.d_model})
        self.name = f"{site.side}.self"

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: KVCache | None = None) -> Float[Tensor, "B T D"]:
        terms = ctx.own.terms if self.uses_terms and ctx.own.terms is not None else Terms()
        parts = self.qkv(x).chunk(3, -1)
        if terms.offset is not None:
            parts = tuple(part + terms.offset for part in parts)
        q, k, v = (split_heads(part, self.heads) for part in parts)
        if terms.rotation is not None:
            q, k = terms.rotation(q), terms.rotation(k)
        if state is not None:
            k, v, _ = state.append(k, v, ctx.own)
        if ctx.trace is not None:
            ctx.trace.add(self.name, attention_weights(q, k, ctx.own, 0.5))
        return self.out(merge_heads(attend(q, k, v, ctx.own, scale=0.5)))

    def start(self, rows: Rows, ctx: Context) -> KVCache:
        return KVCache(rows)


def outcomes(report: Report) -> dict[tuple[str, str], str]:
    return {(verdict.law, verdict.model): verdict.outcome for verdict in report.verdicts}


def test_an_attention_that_ignores_rotation_is_broken() -> None:
    """All other laws hold for such an attention."""
    laws = [law for law in LAWS if law not in ("compile", "kernels")]
    with unchecked():
        results = outcomes(check(Planted(), laws))
    broken = {key for key, outcome in results.items() if outcome == "broken"}
    schemes, families = ("rotary", "injected"), ("decoder_only", "masked_lm")
    assert broken == {(f"positions ({scheme})", family) for scheme in schemes for family in families}
    assert results["positions (distance_bias)", "masked_lm"] == results["positions (shaw)", "decoder_only"] == "kept"
    assert {verdict.outcome for verdict in check(Planted(uses_terms=True), ["positions"]).verdicts} == {"kept"}


def test_the_message_names_the_position_and_what_to_do() -> None:
    detail = next(v.detail for v in check(Planted(), ["positions"]).broken if v.model == "masked_lm")
    assert "'rotary'" in detail
    assert "view.terms" in detail


@dataclass(frozen=True, slots=True)
class Shift(BranchSpec):
    """Reads the previous token, but does not declare that order matters."""

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
    results = outcomes(check(Shift(), ["positions"]))
    assert results["positions (none)", "masked_lm"] == "broken"


@dataclass(frozen=True, slots=True)
class Empty(Position):
    """A position scheme that adds nothing to attention."""

    kind = "planted_empty"

    def build(self, site: Site) -> PositionTerms:
        return _Empty()


class _Empty(PositionTerms):
    def forward(self, view: View) -> Terms:
        return Terms()


@dataclass(frozen=True, slots=True)
class Zeros(Additive):
    """The same vector for all positions."""

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
    """With positions, it depends on order. The law holds in both cases."""
    spec = tiny.families()[family]
    without = swap(spec, Tokens, lambda tokens: replace(tokens, position=None))
    rotary = swap(without, Plain, lambda stack: replace(stack, position=Rotary()))
    side = "source" if spec.reads_source else "target"
    assert tiny.order(tiny.streams(without)[side], causal=False) == (None, False)
    assert tiny.order(tiny.streams(rotary)[side], causal=False)[0] == "rotary"
    for model in (spec, without, rotary):
        assert examine(family, model, ["positions"])[0].outcome == "kept"


@dataclass(frozen=True, slots=True)
class Never(BranchSpec):
    kind = "planted_never"

    def build(self, site: Site) -> Branch:
        raise site.error("", "cannot be built")


def test_a_part_that_is_never_built_is_an_error() -> None:
    """The law does not apply to models that cannot be built, but a part must be built in at least one model."""
    with pytest.raises(SpecError, match="no model could be built around Never"):
        check(Never)
