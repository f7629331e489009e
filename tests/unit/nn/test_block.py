from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import SpecError
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.cache import KVCache, Rows
from regard.nn.core import Branch, Site
from regard.nn.mask import Context, Mask, View
from regard.nn.no_residual import NoResidual
from regard.nn.norm import NoNorm
from regard.nn.residual import PostNorm, PreNorm

MakeSite = Callable[..., Site]
CTX = Context(View(Mask(), 4, 4, torch.device("cpu")))


@dataclass(frozen=True, slots=True)
class Times(BranchSpec):
    """f(x) = factor * x."""

    kind = "times"
    factor: float

    def build(self, site: Site) -> Branch:
        return _Times(self.factor)


class _Times(Branch):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.states: list[Any] = []

    def forward(self, x: Tensor, ctx: Context, state: Any = None) -> Tensor:
        self.states.append(state)
        return self.factor * x

    def start(self, rows: Rows, ctx: Context) -> KVCache:
        return KVCache(rows)


def test_branches_run_in_order_each_with_its_residual_rule(site: MakeSite) -> None:
    x = torch.randn(2, 4, 12)
    rule = PostNorm(NoNorm())
    one_rule = Block((Times(2.0), Times(5.0)), rule).build(site())
    torch.testing.assert_close(one_rule(x, CTX), 3 * 6 * x)
    two_rules = Block((Times(2.0), Times(5.0)), (rule, NoResidual())).build(site())
    torch.testing.assert_close(two_rules(x, CTX), 3 * 5 * x)


def test_one_rule_for_all_builds_a_norm_for_each(site: MakeSite) -> None:
    block = Block((FeedForward(8), FeedForward(8)), PreNorm()).build(site())
    first, second = (branch.norm for branch in block.branches)
    assert first is not second


def test_rules_are_one_per_branch() -> None:
    assert Block((Times(1.0), Times(2.0)), PreNorm()).rules() == (PreNorm(), PreNorm())
    assert Block((Times(1.0), Times(2.0)), (PreNorm(), PostNorm())).rules() == (PreNorm(), PostNorm())


def test_each_branch_gets_its_own_state(site: MakeSite) -> None:
    block = Block((Times(2.0), FeedForward(8), Times(5.0)), NoResidual()).build(site())
    rows = Rows(torch.zeros(2, dtype=torch.int64), 4)
    states = block.start(rows, CTX)
    assert [type(state).__name__ for state in states] == ["KVCache", "NoneType", "KVCache"]
    block(torch.randn(2, 4, 12), CTX, states)
    assert block.branches[0].branch.states == [states[0]]  # type: ignore[reportAttributeAccessIssue]
    assert block.branches[2].branch.states == [states[2]]  # type: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("residual", "path"),
    [(PreNorm(), "block.branches[1].heads"), ((PreNorm(), PostNorm()), "block.branches[1].heads")],
)
def test_an_error_names_the_branch(residual: Any, path: str, site: MakeSite) -> None:
    with pytest.raises(SpecError) as raised:
        Block((FeedForward(8), SelfAttention(heads=5)), residual).build(site(path="block"))
    assert raised.value.path == path


def test_refusals() -> None:
    with pytest.raises(SpecError, match=r"^branches: a block needs at least one branch"):
        Block(())
    with pytest.raises(SpecError, match=r"^residual: 1 rules for 2 branches"):
        Block((Times(1.0), Times(2.0)), (PreNorm(),))
