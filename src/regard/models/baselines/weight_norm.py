"""Weight normalisation: each row of a weight matrix is a learned length times a learned direction."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.core import Role, Site
from regard.nn.init import Uninitialized
from regard.nn.linear import Linear
from regard.nn.vocab.tables import Table, TableSpec


@dataclass(frozen=True, slots=True)
class WeightNorm(Linear):
    """Linear layer y = x W' + b. Row o of W is g_o * v_o / |v_o|, with learned g and v. Salimans & Kingma 2016.

    v is initialised like the weight of a dense layer, and g to |v|, so that W starts as in a dense layer.
    """

    kind = "weight_norm"
    bias: bool = True

    def build(self, d_in: int, widths: Mapping[Role, int], bias: bool | None, site: Site) -> nn.Module:
        direction = torch.empty(sum(widths.values()), d_in)
        for (role, _), rows in zip(widths.items(), direction.split(list(widths.values())), strict=True):
            site.init_.draw(rows, role, site)
        return WeightNormModule(NormedRows(direction, site), self.bias if bias is None else bias)


@dataclass(frozen=True, slots=True)
class NormedEmbeddings(TableSpec):
    """Embedding table with weight-normalised rows g_i v_i / |v_i|, for the output layer of Gehring et al. 2017.

    v is initialised like the weight of an output layer (role `head`), and g to |v|.
    """

    kind = "normed_embeddings"

    def build(self, vocab: int, width: int, site: Site) -> Table:
        direction = torch.empty(vocab, width)
        site.init_.draw(direction, "head", site)
        return NormedEmbeddingsModule(NormedRows(direction, site))


class NormedRows(nn.Module):
    """Module that returns a matrix with rows g_o v_o / |v_o|, where g and v are parameters."""

    def __init__(self, direction: Float[Tensor, "o i"], site: Site) -> None:
        super().__init__()
        length = direction.norm(dim=1)
        if not isinstance(site.init_, Uninitialized) and bool((length == 0).any()):
            problem = f"a row that {site.init_.kind!r} initialises to zero has no direction"
            raise site.error("kind", f"{problem}; use 'dense'")
        self.direction, self.length = nn.Parameter(direction), nn.Parameter(length)

    def forward(self) -> Float[Tensor, "o i"]:
        return self.direction * (self.length / self.direction.norm(dim=1))[:, None]


class WeightNormModule(nn.Module):
    def __init__(self, rows: NormedRows, bias: bool) -> None:
        super().__init__()
        self.rows = rows
        self.bias = nn.Parameter(torch.zeros(rows.length.shape[0])) if bias else None

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        return F.linear(x, self.rows(), self.bias)


class NormedEmbeddingsModule(Table):
    def __init__(self, rows: NormedRows) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n W"]:
        return F.embedding(ids, self.rows())

    def readout(self, h: Float[Tensor, "*n W"]) -> tuple[Float[Tensor, "*n R"], Float[Tensor, "V R"]]:
        return h, self.rows()
