"""The negative log-likelihood of held-out text, without label smoothing, dropout or auxiliary losses."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from regard.batch import Batch
from regard.data.batching import Batching
from regard.data.loader import BatchLoader, Examples
from regard.data.objectives import Objective
from regard.data.token_store import Column, Table
from regard.evaluation.metric import Likelihood
from regard.models.base import Model


@torch.no_grad()
def likelihood(model: Model, table: Table, objective: Objective, batching: Batching) -> Likelihood:
    """Return the summed negative log-likelihood of all labels in a table of examples, and the number of labels."""
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    for item in BatchLoader(Examples([table], [1.0], objective), batching, seed=0).once():
        total += float(model.loss(item.batch.to(device)).nll.double())
        tokens += item.labels
    return Likelihood(total, tokens)


@torch.no_grad()
def stream_likelihood(
    model: Model, text: Column, objective: Objective, length: int, stride: int, rows: int
) -> Likelihood:
    """Return the negative log-likelihood of one long text, read in windows of `length` tokens.

    The windows begin `stride` tokens apart. Each token is counted once, in the first window that contains it. With
    `stride` = `length`, windows do not overlap, and the first token of each window is predicted from one token. With a
    shorter stride, every token after the first window is predicted from at least `length` - `stride` + 1 tokens.
    """
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    for batch in _overlapping(text, objective, length, stride, rows):
        total += float(model.loss(batch.to(device)).nll.double())
        assert batch.weights is not None
        tokens += int(batch.weights.sum())
    return Likelihood(total, tokens)


def _overlapping(text: Column, objective: Objective, length: int, stride: int, rows: int) -> Iterator[Batch]:
    """Yield batches of `rows` windows. A label has weight 1 in the first window that contains it, and 0 in others."""
    labels = len(text.ids) - 1
    starts = np.arange(0, max(1, labels - length + stride), stride)
    for first in range(0, len(starts), rows):
        some = starts[first : first + rows]
        ends = np.minimum(some + length, labels)
        windows = text.spans(some, ends + 1)  # one more token than is read, for the last label
        batch = objective.item({"target": windows}, list(np.arange(len(some))[:, None])).batch
        place = some[:, None] + np.arange(batch.target.shape[1])
        before = np.where(some == 0, 0, some - stride + length)  # end of the previous window
        counted = (place >= before[:, None]) & (place < ends[:, None])
        yield replace(batch, weights=torch.from_numpy(counted).to(torch.get_default_dtype()))
