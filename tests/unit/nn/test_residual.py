from collections.abc import Callable

import pytest
import torch
from torch import nn

from regard.nn.cache import KVCache, Rows
from regard.nn.core import Site
from regard.nn.deep_norm import DeepNorm
from regard.nn.mask import Context, Mask, View
from regard.nn.no_residual import NoResidual
from regard.nn.norm import LayerNorm, NoNorm
from regard.nn.residual import PostNorm, PreNorm, Residual
from regard.nn.rms_norm import RMSNorm
from regard.nn.sandwich import Sandwich
from tests.unit.nn.affine import Affine

MakeSite = Callable[..., Site]
CTX = Context(View(Mask(), 5, 5, torch.device("cpu")))


def norms(module: nn.Module) -> list[nn.Module]:
    """Return the norms of a residual branch, with random weights."""
    modules = [m for name, m in module.named_children() if name not in ("branch", "dropout")]
    for norm in modules:
        for parameter in norm.parameters():
            nn.init.normal_(parameter, 1.0)
    return modules


def alpha(N: int, M: int, side: str) -> float:
    """Wang et al. 2022, table 2."""
    if not N or not M:
        return (2 * (N or M)) ** 0.25
    return 0.81 * (N**4 * M) ** (1 / 16) if side == "encoder" else (3 * M) ** 0.25


def test_pre_norm(site: MakeSite) -> None:
    branch = Affine()
    rule = PreNorm().wrap(branch, site())
    (norm,), x = norms(rule), torch.randn(2, 5, 12)
    torch.testing.assert_close(rule(x, CTX), x + branch.f(norm(x)))


def test_post_norm(site: MakeSite) -> None:
    branch = Affine()
    rule = PostNorm(RMSNorm()).wrap(branch, site())
    (norm,), x = norms(rule), torch.randn(2, 5, 12)
    assert isinstance(norm, nn.RMSNorm)
    torch.testing.assert_close(rule(x, CTX), norm(x + branch.f(x)))


def test_sandwich(site: MakeSite) -> None:
    branch = Affine()
    rule = Sandwich().wrap(branch, site())
    (inner, outer), x = norms(rule), torch.randn(2, 5, 12)
    assert inner is not outer
    torch.testing.assert_close(rule(x, CTX), x + outer(branch.f(inner(x))))


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize(("N", "M"), [(6, 6), (18, 4), (12, 0), (0, 24)])
def test_deep_norm(N: int, M: int, side: str, site: MakeSite) -> None:
    branch = Affine()
    rule = DeepNorm().wrap(branch, site(encoder_depth=N, decoder_depth=M, side=side))
    (norm,), x = norms(rule), torch.randn(2, 5, 12)
    torch.testing.assert_close(rule(x, CTX), norm(alpha(N, M, side) * x + branch.f(x)))


def test_deep_norm_alpha_of_the_paper(site: MakeSite) -> None:
    """alpha is 200^(1/4) = 3.7606 for 100 encoder layers without decoder, and 1.9987 and 2.7108 for 18 + 18 layers."""
    for N, M, side, value in ((100, 0, "encoder", 3.7606), (18, 18, "encoder", 1.9987), (18, 18, "decoder", 2.7108)):
        rule = DeepNorm().wrap(Affine(), site(encoder_depth=N, decoder_depth=M, side=side))
        assert rule.alpha == pytest.approx(value, abs=1e-4)


def test_no_residual(site: MakeSite) -> None:
    branch = Affine()
    rule = NoResidual(LayerNorm()).wrap(branch, site())
    (norm,), x = norms(rule), torch.randn(2, 5, 12)
    torch.testing.assert_close(rule(x, CTX), branch.f(norm(x)))


RULES = [PreNorm(), PostNorm(), Sandwich(), DeepNorm(), NoResidual()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_decode_state_is_that_of_the_branch(rule: Residual, site: MakeSite) -> None:
    branch = Affine()
    residual, rows = rule.wrap(branch, site()), Rows(torch.zeros(2, dtype=torch.int64), 4)
    state = residual.start(rows, CTX)
    assert isinstance(state, KVCache)
    residual(torch.randn(2, 5, 12), CTX, state)
    assert branch.states == [state]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_dropout_applies_to_the_branch_output_in_training_only(rule: Residual, site: MakeSite) -> None:
    residual, x = rule.wrap(Affine(), site(dropout=0.5)), torch.randn(2, 5, 12)
    residual.eval()
    without = rule.wrap(Affine(), site())
    without.load_state_dict(residual.state_dict())
    assert torch.equal(residual(x, CTX), without(x, CTX))
    residual.train()
    assert not torch.equal(residual(x, CTX), residual(x, CTX))


def test_dropout_rescales_kept_values(site: MakeSite) -> None:
    branch, x = Affine(), torch.randn(2, 500, 12)
    residual = NoResidual().wrap(branch, site(dropout=0.25))
    ratio = residual(x, CTX) / branch.f(x)
    assert bool(((ratio == 0) | ((ratio - 1 / 0.75).abs() < 1e-9)).all())
    assert (ratio == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("rule", "ends"),
    [(PreNorm(), True), (Sandwich(RMSNorm()), True), (PostNorm(), False), (DeepNorm(), False), (NoResidual(), False)],
    ids=lambda value: getattr(value, "kind", value),
)
def test_only_rules_with_unnormalised_outputs_have_a_final_norm(rule: Residual, ends: bool, site: MakeSite) -> None:
    end = rule.end(site())
    assert bool(list(end.parameters())) is ends
    if ends:
        assert type(end) is type(rule.norm.build(site()))  # type: ignore[reportAttributeAccessIssue]


def test_the_norm_may_be_none(site: MakeSite) -> None:
    branch, x = Affine(), torch.randn(2, 5, 12)
    assert torch.equal(PostNorm(NoNorm()).wrap(branch, site())(x, CTX), x + branch.f(x))
