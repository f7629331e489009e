"""Parallel branches: sublayers with the same input, whose outputs are added."""

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.block import state_at
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import Rows
from regard.nn.checks import require
from regard.nn.core import Branch, Site
from regard.nn.mask import Context


@dataclass(frozen=True, slots=True)
class Parallel(BranchSpec):
    """The sum f_1(x) + f_2(x) + ... of several branches with the same input.

    Used for attention and feed-forward in GPT-J (Wang and Komatsuzaki 2021) and PaLM (Chowdhery et al. 2022), and
    for self- and cross-attention in the Evolved Transformer (So et al. 2019).
    """

    kind = "parallel_branches"
    branches: tuple[BranchSpec, ...]

    def check(self) -> None:
        require(len(self.branches) > 0, "branches", "needs at least one branch")

    def build(self, site: Site) -> Branch:
        return ParallelModule([branch.build(site.inside(f"branches[{i}]")) for i, branch in enumerate(self.branches)])


class ParallelModule(Branch):
    def __init__(self, branches: list[Branch]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: tuple[Any, ...] | None = None
    ) -> Float[Tensor, "B T D"]:
        return reduce(operator.add, (branch(x, ctx, state_at(state, i)) for i, branch in enumerate(self.branches)))

    def start(self, rows: Rows, ctx: Context) -> tuple[Any, ...]:
        return tuple(branch.start(rows, ctx) for branch in self.branches)  # type: ignore[reportCallIssue]
