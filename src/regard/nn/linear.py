"""The linear slot: the specs that build every projection of a model."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from regard.nn.core import Role, Site
from regard.tree import Spec


class Linear(Spec):
    """The linear slot: the specs that build projections."""

    __slots__ = ()

    @abstractmethod
    def build(self, d_in: int, widths: Mapping[Role, int], bias: bool | None, site: Site) -> nn.Module:
        """Return a linear map from d_in to sum(widths) channels. `bias` overrides the spec's default, unless None."""


@dataclass(frozen=True, slots=True)
class Dense(Linear):
    """y = x W' + b. Weights are initialised by role, biases with zero."""

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
    """torch's linear layer without its initialisation, because the init spec initialises the weights afterwards."""

    def reset_parameters(self) -> None:
        pass
