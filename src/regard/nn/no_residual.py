"""Blocks without residual connections."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.norm import NoNorm, Norm
from regard.nn.residual import Residual, ResidualBranch


@dataclass(frozen=True, slots=True)
class NoResidual(Residual):
    """f(norm(x)): no residual connection."""

    kind = "no_residual"
    norm: Norm = NoNorm()

    def wrap(self, branch: Branch, site: Site) -> Branch:
        return NoResidualModule(branch, self.norm.build(site), site.dropout)


class NoResidualModule(ResidualBranch):
    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        return self.dropout(self.branch(self.norm(x), ctx, state))
