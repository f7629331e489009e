"""Position-wise feed-forward network."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.activation import ACTIVATIONS, Activation
from regard.nn.branches.base import BranchSpec
from regard.nn.checks import check_count
from regard.nn.core import Branch, Site
from regard.nn.mask import Context


@dataclass(frozen=True, slots=True)
class FeedForward(BranchSpec):
    """phi(x W_up + b) W_down + c, or with `gated`, (phi(x W_gate + b) * (x W_up + b')) W_down + c (Shazeer 2020)."""

    kind = "feedforward"
    d_hidden: int | None = None  # None: 4 * d_model
    activation: Activation = "relu"  # phi
    gated: bool = False
    bias: bool | None = None  # None: the default of the model's linear layers

    def check(self) -> None:
        check_count("d_hidden", self.d_hidden)

    def build(self, site: Site) -> Branch:
        return (GatedFeedForwardModule if self.gated else FeedForwardModule)(self, site)


class FeedForwardModule(Branch):
    def __init__(self, spec: FeedForward, site: Site) -> None:
        super().__init__()
        F = spec.d_hidden or 4 * site.d_model
        self.up = site.linear(site.d_model, {"up": F}, bias=spec.bias)
        self.down = site.linear(F, {"down": site.d_model}, bias=spec.bias)
        self.activate, self.dropout = ACTIVATIONS[spec.activation], nn.Dropout(site.activation_dropout)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:  # noqa: ARG002
        return self.down(self.dropout(self.activate(self.up(x))))


class GatedFeedForwardModule(Branch):
    def __init__(self, spec: FeedForward, site: Site) -> None:
        super().__init__()
        F = spec.d_hidden or 4 * site.d_model
        self.gate_up = site.linear(site.d_model, {"gate": F, "up": F}, bias=spec.bias)
        self.down = site.linear(F, {"down": site.d_model}, bias=spec.bias)
        self.activate, self.dropout = ACTIVATIONS[spec.activation], nn.Dropout(site.activation_dropout)

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:  # noqa: ARG002
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.dropout(self.activate(gate) * up))
