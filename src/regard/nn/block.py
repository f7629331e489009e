"""Block (Transformer layer): a sequence of sublayers with residual connections."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.branches.base import BranchSpec
from regard.nn.cache import Rows
from regard.nn.checks import require
from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.residual import PostNorm, Residual
from regard.tree import Spec


@dataclass(frozen=True, slots=True)
class Block(Spec):
    """A Transformer layer: a sequence of branches (sublayers). `residual` is one rule for all branches, or one each."""

    kind = "block"
    branches: tuple[BranchSpec, ...]
    residual: Residual | tuple[Residual, ...] = PostNorm()

    def check(self) -> None:
        require(len(self.branches) > 0, "branches", "a block needs at least one branch")
        rules, branches = len(self.rules()), len(self.branches)
        require(rules == branches, "residual", f"{rules} rules for {branches} branches; give one each")

    def rules(self) -> tuple[Residual, ...]:
        """Return one residual rule (such as pre-norm) per branch."""
        return self.residual if isinstance(self.residual, tuple) else (self.residual,) * len(self.branches)

    def build(self, site: Site) -> "BlockModule":
        built = []
        for i, (branch, rule) in enumerate(zip(self.branches, self.rules(), strict=True)):
            where = f"residual[{i}]" if isinstance(self.residual, tuple) else "residual"
            built.append(rule.wrap(branch.build(site.inside(f"branches[{i}]")), site.inside(where)))
        return BlockModule(built)


def state_at(states: Sequence[Any] | None, call: int) -> Any:
    """Return the decoding state with index `call`, or None if `states` is None (outside decoding)."""
    return None if states is None else states[call]


class BlockModule(nn.Module):
    def __init__(self, branches: list[Branch]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        for i, branch in enumerate(self.branches):
            x = branch(x, ctx, state_at(state, i))
        return x

    def start(self, rows: Rows, ctx: Context) -> tuple[Any, ...]:
        """Return the new decoding states for one application of the block: one state per branch."""
        return tuple(branch.start(rows, ctx) for branch in self.branches)  # type: ignore[reportCallIssue]
