"""Fixup: deep models without norms. `Fixup`, `FixupLinear` and `FixupInit` are to be used together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.checks import require
from regard.nn.core import Branch, Role, Site
from regard.nn.init import Init, Uninitialized, Xavier
from regard.nn.linear import Dense, Linear
from regard.nn.mask import Context
from regard.nn.residual import Residual, ResidualBranch


@dataclass(frozen=True, slots=True)
class Fixup(Residual):
    """x + s * f(x + t) for a branch f, with learned scalars s and t, initially 1 and 0. Zhang et al. 2019.

    The final output is (x + t) * s in an encoder and x + t in a decoder. With `FixupLinear` and `FixupInit`, the
    outputs of all branches are initially 0.
    """

    kind = "fixup"

    def wrap(self, branch: Branch, site: Site) -> Branch:
        return FixupModule(branch, site.dropout)

    def end(self, site: Site) -> nn.Module:
        return FixupEnd(scaled=site.side == "encoder")


class FixupModule(ResidualBranch):
    def __init__(self, branch: Branch, dropout: float) -> None:
        super().__init__(branch, nn.Identity(), dropout)
        self.shift = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        return x + self.scale * self.dropout(self.branch(x + self.shift, ctx, state))


class FixupEnd(nn.Module):
    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1)) if scaled else None

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        x = x + self.shift
        return x if self.scale is None else x * self.scale


@dataclass(frozen=True, slots=True)
class FixupLinear(Linear):
    """Feed-forward projections x W_up' and (x + u) W_down', with a learned scalar u, initially 0.

    They have biases only if the branch itself sets `bias=True`. All other projections are as in `Dense`.
    """

    kind = "fixup_linear"
    bias: bool = True  # default for all other projections

    def build(self, d_in: int, widths: Mapping[Role, int], bias: bool | None, site: Site) -> nn.Module:
        if not widths.keys() & {"up", "gate", "down"}:
            return Dense(self.bias).build(d_in, widths, bias, site)
        dense = Dense(bias=False).build(d_in, widths, bias, site)
        return ShiftedProjection(dense) if "down" in widths else dense


class ShiftedProjection(nn.Module):
    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self.dense = dense
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Float[Tensor, "*n F"]) -> Float[Tensor, "*n D"]:
        return self.dense(x + self.shift)


@dataclass(frozen=True, slots=True)
class FixupInit(Init):
    """Zhang et al. 2019: W_o and W_down are 0. The scale of other weights depends on the number L of branches.

    In a branch with m weight matrices, the factor is L^(-1 / (2 * m - 2)). W_q, W_k and W_v have Glorot uniform weights
    times L^-1/6 (m = 4), and W_up has He uniform weights times L^-1/2 (m = 2). W_gate is not scaled, because its output
    is multiplied by the output of W_up, which is scaled. `others` initialises embedding tables and heads.

    Differs from Narang et al. 2021, where cross-attention is by mistake not initialised to 0.
    """

    kind = "fixup_init"
    others: Init = Xavier()

    def check(self) -> None:
        require(
            not isinstance(self.others, FixupInit | Uninitialized),
            "others",
            f"{self.others.kind!r} does not initialise tables; choose xavier, fan_in or normal",
        )

    def draw(self, weight: Tensor, role: Role, site: Site) -> None:
        L, d_in = site.branches, weight.shape[-1]
        if role in ("attend_out", "down"):
            bound = 0.0
        elif role in ("query", "key", "value"):
            bound = L ** (-1 / 6) * math.sqrt(6 / (d_in + weight.shape[-2]))
        elif role in ("up", "gate"):
            bound = math.sqrt(6 / d_in) * (L**-0.5 if role == "up" else 1.0)
        else:
            self.others.draw(weight, role, site)
            return
        with torch.no_grad():
            weight.uniform_(-bound, bound)
