"""Fused norms, residual connections, feed-forward branches and token embeddings, for training.

On CUDA in bfloat16, our Triton kernels normalise a residual sum without storing it, and apply ReLU inside the matrix
product. Otherwise, the modules call torch's operations. Under autocast, torch's norms would return float32. Here,
hidden states stay in bfloat16, which saves time because norms and sums are limited by memory bandwidth.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.fast.attention import has_kernels
from regard.nn.branches.feedforward import FeedForwardModule
from regard.nn.embedding import TokensModule
from regard.nn.layer_norm import LayerNormModule
from regard.nn.linear import Projection
from regard.nn.mask import Context
from regard.nn.residual import PostNormModule
from regard.nn.rms_norm import PartialRMSNormModule
from regard.nn.scale_norm import ScaleNormModule

WIDEST = 4096  # the largest number of channels in our layer norm, whose kernel loads whole vectors


class FastLayerNorm(nn.LayerNorm):
    """Layer norm whose output has the dtype of the input, even under autocast."""

    def forward(self, input: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:  # torch's name
        return self.fused(input) if self.fits(input) else super().forward(input).type_as(input)

    def fits(self, x: Float[Tensor, "*n D"]) -> bool:
        """Return whether our Triton kernel can be used for x."""
        return has_kernels(x) and self.weight is not None and self.bias is not None and x.shape[-1] <= WIDEST

    def fused(
        self, x: Float[Tensor, "*n D"], added: Float[Tensor, "*n D"] | None = None, dropout: float = 0.0
    ) -> Float[Tensor, "*n D"]:
        """Return the norm of x, or of x + dropout(added), computed by our Triton kernel."""
        from regard.fast.layer_norm import layer_norm  # noqa: PLC0415  # needs Triton

        return layer_norm(x, self.weight, self.bias, self.eps, added, dropout)


class FastRMSNorm(nn.RMSNorm):
    """RMS norm whose output has the dtype of the input, even under autocast."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        return super().forward(x).type_as(x)


class FastLectureNorm(LayerNormModule):
    """Variants of layer norm (`LayerNormModule`) whose output has the dtype of the input, even under autocast."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        return super().forward(x).type_as(x)


class FastPartialRMSNorm(PartialRMSNormModule):
    """Partial RMS norm whose output has the dtype of the input, even under autocast."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        return super().forward(x).type_as(x)


class FastScaleNorm(ScaleNormModule):
    """Scale norm whose output has the dtype of the input, even under autocast."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        return super().forward(x).type_as(x)


class FusedPostNorm(PostNormModule):
    """A post-norm residual branch norm(x + dropout(f(x))), with sum, dropout and layer norm in one kernel."""

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        y, norm = self.branch(x, ctx, state), self.norm
        if isinstance(norm, FastLayerNorm) and norm.fits(x) and y.dtype == x.dtype:
            return norm.fused(x, y, self.dropout.p if self.training else 0.0)
        return norm(x + self.dropout(y)).type_as(x)


class FusedFeedForward(FeedForwardModule):
    """A feed-forward branch ReLU(x W_up + b) W_down + c, with ReLU computed inside the first matrix product."""

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        if not has_kernels(x) or not isinstance(self.up, Projection) or self.up.bias is None:
            return super().forward(x, ctx, state)
        from regard.fast.linear_relu import linear_relu  # noqa: PLC0415  # needs Triton

        return self.down(self.dropout(linear_relu(x, self.up.weight, self.up.bias)))


class FastTokens(TokensModule):
    """Token embeddings, in bfloat16 if autocast uses bfloat16, so that all hidden states are in bfloat16."""

    def normalised(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        x = super().normalised(x)
        # The range of float16 is too small for a sum of many branches.
        half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
        return x.bfloat16() if x.is_cuda and half else x
