"""The plain negative log-likelihood of held-out text: without smoothing, dropout or auxiliary terms."""

from dataclasses import dataclass

import torch

from regard.data.batching import Batching
from regard.data.objectives import Objective
from regard.data.store import Table
from regard.data.stream import Examples, Stream
from regard.models.base import Model


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Summed over a text; tokens include the end of every line where the model says it."""

    nll: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens


@torch.no_grad()
def likelihood(model: Model, table: Table, objective: Objective, batching: Batching) -> Likelihood:
    """The likelihood of every label of a table, each seen once."""
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    for item in Stream(Examples([table], [1.0], objective), batching, seed=0).once():
        total += float(model.loss(item.batch.to(device)).nll.double())
        tokens += item.labels
    return Likelihood(total, tokens)
