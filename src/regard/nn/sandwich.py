"""Sandwich norm: a norm before and after every branch."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.norm import LayerNorm, Norm
from regard.nn.residual import Residual, ResidualBranch


@dataclass(frozen=True, slots=True)
class Sandwich(Residual):
    """x + norm(f(norm(x))), and a norm at the end of the stack. Ding et al. 2021, CogView."""

    kind = "sandwich"
    norm: Norm = LayerNorm()

    def wrap(self, branch: Branch, site: Site) -> Branch:
        return SandwichModule(branch, self.norm.build(site), self.norm.build(site), site.dropout)

    def end(self, site: Site) -> nn.Module:
        return self.norm.build(site)


class SandwichModule(ResidualBranch):
    def __init__(self, branch: Branch, norm: nn.Module, after: nn.Module, dropout: float) -> None:
        super().__init__(branch, norm, dropout)
        self.after = after

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        return x + self.dropout(self.after(self.branch(self.norm(x), ctx, state)))
