"""`Linear`, the base class of specs that build all projections of a model, and `Dense`, the default."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from regard.nn.core import Role, Site
from regard.tree import Spec


class Linear(Spec):
    """Abstract base class of specs that build the linear layers (projections) of a model."""

    __slots__ = ()

    @abstractmethod
    def build(self, d_in: int, widths: Mapping[Role, int], bias: bool | None, site: Site) -> nn.Module:
        """Build a linear layer from d_in to sum(widths) channels. A `bias` of None means the default of the spec."""


@dataclass(frozen=True, slots=True)
class Dense(Linear):
    """y = x W' + b. Weights are initialised according to their role (query, up, ...). Biases start at zero."""

    kind = "dense"
    bias: bool = True

    def build(self, d_in: int, widths: Mapping[Role, int], bias: bool | None, site: Site) -> nn.Module:
        linear = Projection(d_in, sum(widths.values()), self.bias if bias is None else bias)
        with torch.no_grad():
            if linear.bias is not None:
                linear.bias.zero_()
            for (role, _), rows in zip(widths.items(), linear.weight.split(list(widths.values())), strict=True):
                site.init_.draw(rows, role, site)
        return linear


class Projection(nn.Linear):
    """`nn.Linear` without initialisation. The init spec initialises the weights afterwards."""

    def reset_parameters(self) -> None:
        pass
