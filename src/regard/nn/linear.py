"""Linear slot: how every projection of a model is made."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.core import Role, Site, own_kernels
from regard.nn.packed import PrepackableLinear
from regard.tree import Spec


class Linear(Spec):
    """Slot: makes projections."""

    __slots__ = ()

    @abstractmethod
    def build(self, d_in: int, widths: Mapping[Role, int], bias: bool | None, site: Site) -> nn.Module:
        """A map from d_in to sum(widths); `bias` overrules the kind's own choice."""


@dataclass(frozen=True, slots=True)
class Dense(Linear):
    """y = x W' + b. Weights are drawn by role, biases start at zero."""

    kind = "dense"
    bias: bool = True

    def build(self, d_in: int, widths: Mapping[Role, int], bias: bool | None, site: Site) -> nn.Module:
        linear = _Dense(d_in, sum(widths.values()), self.bias if bias is None else bias)
        with torch.no_grad():
            if linear.bias is not None:
                linear.bias.zero_()
            for (role, _), rows in zip(widths.items(), linear.weight.split(list(widths.values())), strict=True):
                site.init_.draw(rows, role, site)
        return linear


class _Dense(nn.Linear, PrepackableLinear):
    def forward(self, input: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        return self.product(input, self.bias)

    def reset_parameters(self) -> None:
        """Nothing: the init slot draws the weights, and drawing twice would double the time to build."""


def is_plain(projection: nn.Module) -> bool:
    """Whether a projection is x W' + b and nothing else, so that a fused kernel may take its weights."""
    return type(projection) is _Dense


def rectified(projection: nn.Module, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
    """relu of a projection; where a GPU trains in half precision, relu is made inside the product."""
    if own_kernels(x) and type(projection) is _Dense and projection.bias is not None:
        from regard.nn.linear_relu import linear_relu  # noqa: PLC0415  # needs Triton

        return linear_relu(x, projection.weight, projection.bias)
    return F.relu(projection(x))
