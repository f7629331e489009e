"""ReZero: residual branches scaled by a learned scalar that starts at 0."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.norm import NoNorm, Norm
from regard.nn.residual import Residual, ResidualBranch


@dataclass(frozen=True, slots=True)
class ReZero(Residual):
    """x + alpha * f(norm(x)), with a learned scalar alpha per branch, initially 0. Bachlechner et al. 2021.

    Before training, a stack without norms is the identity. If branches have norms, the stack also ends with a norm.
    """

    kind = "rezero"
    norm: Norm = NoNorm()

    def wrap(self, branch: Branch, site: Site) -> Branch:
        return ReZeroModule(branch, self.norm.build(site), site.dropout)

    def end(self, site: Site) -> nn.Module:
        return self.norm.build(site)


class ReZeroModule(ResidualBranch):
    def __init__(self, branch: Branch, norm: nn.Module, dropout: float) -> None:
        super().__init__(branch, norm, dropout)
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        return x + self.alpha * self.dropout(self.branch(self.norm(x), ctx, state))
