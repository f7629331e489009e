"""The laws find faults in parts written for these tests, and give one verdict per law."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.recurrent import Recurrence
from regard.nn.branches.self_attention import SelfAttention, SelfAttentionModule
from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.norm import LayerNorm, Norm
from regard.nn.stacks.plain import Plain
from regard.testing import LAWS, check, examine, tiny
from regard.testing.laws import LawBroken, Subject, close


class FutureModule(Branch):
    """Returns the hidden states of the next tokens."""

    def forward(self, x: Tensor, ctx: Context, state: object = None) -> Tensor:
        return x.roll(-1, 1)


@dataclass(frozen=True, slots=True)
class Future(BranchSpec):
    kind = "test_future"

    def build(self, site: Site) -> Branch:
        return FutureModule()


@dataclass(frozen=True, slots=True)
class Unused(Norm):
    kind = "test_unused"

    def build(self, site: Site, width: int | None = None) -> nn.Module:
        norm = LayerNorm().build(site, width)
        norm.register_parameter("spare", nn.Parameter(torch.zeros(1)))
        return norm


def test_a_part_that_reads_the_future_breaks_causality() -> None:
    verdicts = {verdict.model: verdict for verdict in check(Future, ["causality"]).verdicts}
    assert verdicts["decoder_only"].outcome == "broken"
    assert "outputs before it" in verdicts["decoder_only"].detail
    assert verdicts["masked_lm"].outcome == "not applicable"


def test_a_parameter_without_a_gradient_is_named() -> None:
    report = check(Unused, ["parameters"])
    assert len(report.broken) == len(report.verdicts) > 0
    assert all("no gradient reaches" in verdict.detail and "spare" in verdict.detail for verdict in report.broken)


def test_the_verdict_on_a_bent_law_has_the_reason() -> None:
    report = check(Unused, ["parameters"], {"parameters": "a spare parameter"})
    assert not report.broken
    assert {verdict.outcome for verdict in report.verdicts} == {"bent"}
    assert all(verdict.detail.startswith("a spare parameter (") for verdict in report.verdicts)


def test_a_model_that_cannot_be_built_has_one_verdict_per_law() -> None:
    block = Block((Recurrence(bidirectional=True), FeedForward(24)))
    backwards = replace(tiny.decoder_only(), decoder=Plain((block,), 1))
    verdicts = examine("backwards", backwards, ["padding", "batch"])
    assert [(verdict.law, verdict.outcome) for verdict in verdicts] == [("padding", "refused"), ("batch", "refused")]


def test_the_error_for_an_unknown_law_suggests_a_name() -> None:
    with pytest.raises(SpecError, match="causality"):
        examine("model", tiny.decoder_only(), ["causalty"])


def test_every_law_has_a_statement_of_one_sentence() -> None:
    for law in LAWS.values():
        assert law.statement.endswith("."), law.name


def test_a_model_is_shared_until_a_law_changes_it() -> None:
    subject = Subject(tiny.decoder_only())
    model = subject.model()
    assert subject.model() is model
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert subject.model() is not model
    assert subject.own_model() is not subject.own_model()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3), r"^outputs: shapes \(2,\) and \(3,\)$"),
        (torch.tensor([0.0, torch.nan]), "^outputs: NaN or infinity$"),
        (torch.tensor([0.0, 0.5]), r"^outputs: differs by 0\.5$"),
    ],
)
def test_close_reports_the_difference(other: Tensor, message: str) -> None:
    close(torch.zeros(2), torch.zeros(2), "outputs")
    with pytest.raises(LawBroken, match=message):
        close(torch.zeros(2), other, "outputs")


class RecordsModule(SelfAttentionModule):
    """Self-attention that records other weights than it uses, records nothing, or changes its output when recorded."""

    fault: str

    def forward(self, x: Tensor, ctx: Context, state: object = None) -> Tensor:
        if self.fault == "silent":
            return super().forward(x, replace(ctx, trace=None), state)  # type: ignore[reportArgumentType]
        y = super().forward(x, ctx, state)  # type: ignore[reportArgumentType]
        if ctx.trace is not None and self.fault == "changes":
            return y + 1e-12
        if ctx.trace is not None:
            weights = ctx.trace.weights[self.name][-1]
            ctx.trace.entries[-1] = (self.name, weights.flip(1))  # type: ignore[reportAttributeAccessIssue]
        return y


@dataclass(frozen=True, slots=True)
class Records(BranchSpec):
    kind = "test_records"
    attends = True
    fault: str = "other"

    def build(self, site: Site) -> Branch:
        module = SelfAttention().build(site)
        module.__class__ = RecordsModule
        module.fault = self.fault  # type: ignore[reportAttributeAccessIssue]
        return module


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other", "recorded weights and those of the reference kernel: differs by"),
        ("silent", "calls of named branches have"),
        ("changes", "outputs differ when a trace is present"),
    ],
)
def test_wrong_records_of_attention_break_inspection(fault: str, message: str) -> None:
    report = check(Records(fault=fault), ["inspection"])
    assert len(report.broken) == len(report.verdicts) > 0
    assert all(message in verdict.detail for verdict in report.broken)
