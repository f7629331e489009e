"""A residual rule with the gates of a GRU."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.norm import LayerNorm, Norm
from regard.nn.residual import Residual, ResidualBranch


@dataclass(frozen=True, slots=True)
class GatedRecurrent(Residual):
    """x + (1 - z) * y + z * c with y = f(norm(x)): the gates of a GRU around a branch f, as in Narang et al. 2021.

    z = sigmoid([n(x); n(y)] W_z + b_z), r = sigmoid([n(n(x)); n(n(y))] W_r + b_r),
    c = sigmoid([n(r * x); n(y)] W_c + b_c), where n is a second norm, shared by all inputs of the gates.

    Differs from Cho et al. 2014: the candidate c has a sigmoid instead of tanh, the inputs of the reset gate r are
    normalised twice, and the result is added to x instead of replacing it.
    """

    kind = "gated_recurrent"
    norm: Norm = LayerNorm()

    def wrap(self, branch: Branch, site: Site) -> Branch:
        return GatedRecurrentModule(branch, self.norm.build(site), self.norm.build(site), site)

    def end(self, site: Site) -> nn.Module:
        return self.norm.build(site)


class GatedRecurrentModule(ResidualBranch):
    def __init__(self, branch: Branch, norm: nn.Module, gate_norm: nn.Module, site: Site) -> None:
        super().__init__(branch, norm, site.dropout)
        D = site.d_model
        self.gate_norm = gate_norm
        self.update = site.linear(2 * D, {"other": D}, bias=True)
        self.reset = site.linear(2 * D, {"other": D}, bias=True)
        self.candidate = site.linear(2 * D, {"other": D}, bias=True)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        y = self.branch(self.norm(x), ctx, state)
        n = self.gate_norm
        normed_x, normed_y = n(x), n(y)
        z = self.update(torch.cat((normed_x, normed_y), -1)).sigmoid()
        r = self.reset(torch.cat((n(normed_x), n(normed_y)), -1)).sigmoid()
        c = self.candidate(torch.cat((n(r * x), normed_y), -1)).sigmoid()
        return x + self.dropout((1 - z) * y + z * c)
