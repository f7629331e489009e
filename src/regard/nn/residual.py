"""Residual rules, which combine a branch f with a residual connection and a norm (post-norm, pre-norm, ...)."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.cache import Rows, State
from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.norm import LayerNorm, Norm
from regard.tree import Spec


class Residual(Spec):
    """Abstract base class of residual rules, which turn a branch f into a residual branch, such as x + f(norm(x))."""

    __slots__ = ()

    @abstractmethod
    def wrap(self, branch: Branch, site: Site) -> Branch:
        """Return a module that applies `branch` with a residual connection."""

    def end(self, site: Site) -> nn.Module:  # noqa: ARG002
        """Return the module after the last block: a final norm, or the identity."""
        return nn.Identity()


class ResidualBranch(Branch):
    """Abstract base class of modules that apply a branch with a norm, dropout and a residual connection."""

    def __init__(self, branch: Branch, norm: nn.Module, dropout: float) -> None:
        super().__init__()
        self.branch, self.norm, self.dropout = branch, norm, nn.Dropout(dropout)

    def start(self, rows: Rows, ctx: Context) -> State | tuple[Any, ...] | None:
        return self.branch.start(rows, ctx)


@dataclass(frozen=True, slots=True)
class PreNorm(Residual):
    """x + f(norm(x)), and a norm at the end of the stack. Used in most models since GPT-2."""

    kind = "pre_norm"
    norm: Norm = LayerNorm()

    def wrap(self, branch: Branch, site: Site) -> Branch:
        return PreNormModule(branch, self.norm.build(site), site.dropout)

    def end(self, site: Site) -> nn.Module:
        return self.norm.build(site)


class PreNormModule(ResidualBranch):
    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        return x + self.dropout(self.branch(self.norm(x), ctx, state))


@dataclass(frozen=True, slots=True)
class PostNorm(Residual):
    """norm(x + f(x)), as in Vaswani et al. 2017."""

    kind = "post_norm"
    norm: Norm = LayerNorm()

    def wrap(self, branch: Branch, site: Site) -> Branch:
        return PostNormModule(branch, self.norm.build(site), site.dropout)


class PostNormModule(ResidualBranch):
    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        return self.norm(x + self.dropout(self.branch(x, ctx, state)))
