"""DeepNorm: post-norm with a scaled residual connection, for very deep stacks."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.norm import LayerNorm, Norm
from regard.nn.residual import Residual, ResidualBranch


@dataclass(frozen=True, slots=True)
class DeepNorm(Residual):
    """norm(alpha * x + f(x)) for a branch f, to be used with the init `DeepNormInit`. Wang et al. 2022.

    In a single stack of N blocks, alpha = (2 * N)^1/4. With N encoder and M decoder blocks, alpha is 0.81 * (N^4 *
    M)^1/16 in the encoder and (3 * M)^1/4 in the decoder.
    """

    kind = "deep_norm"
    norm: Norm = LayerNorm()

    def wrap(self, branch: Branch, site: Site) -> Branch:
        N, M = site.encoder_depth, site.decoder_depth
        if not N or not M:
            alpha = (2 * max(N, M)) ** 0.25
        else:
            alpha = 0.81 * (N**4 * M) ** (1 / 16) if site.side == "encoder" else (3 * M) ** 0.25
        return DeepNormModule(branch, self.norm.build(site), site.dropout, alpha)


class DeepNormModule(ResidualBranch):
    def __init__(self, branch: Branch, norm: nn.Module, dropout: float, alpha: float) -> None:
        super().__init__(branch, norm, dropout)
        self.alpha = alpha

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        return self.norm(self.alpha * x + self.dropout(self.branch(x, ctx, state)))
