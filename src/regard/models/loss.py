"""The loss of a batch, summed over its labels."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.batch import Batch, require_data
from regard.errors import DataError
from regard.nn.vocab.base import Head
from regard.nn.vocab.tables import Table


class Loss(NamedTuple):
    """Loss of a batch, summed over its labels. The mean loss of several batches is sum(total) / sum(tokens)."""

    total: Float[Tensor, ""]  # the objective, with label smoothing, without `aux`
    tokens: Float[Tensor, ""]  # the sum of the label weights
    aux: Float[Tensor, ""]  # the sum of auxiliary losses, such as load balancing of experts
    nll: Float[Tensor, ""]  # the negative log-likelihood, without smoothing


def token_loss(
    head: Head, table: "Table | None", h: Float[Tensor, "B T D"], batch: Batch, losses: list[Tensor] | None
) -> Loss:
    """Return the `Loss` of a vocabulary head over all labels of a batch, with the auxiliary `losses` of modules."""
    if batch.labels is None or batch.labels.shape != batch.target.shape:
        raise DataError("labels: the loss needs one label per target token")
    h, labels, weights = real_rows(h, batch.labels, label_weights(batch))
    scored = head.score(h, labels, weights, table)
    aux = sum(losses or (), scored.objective.new_zeros(()))
    return Loss(scored.objective, weights.sum(), aux, scored.nll)


def label_weights(batch: Batch) -> Float[Tensor, "B T"]:
    """Return the weight of every label: `batch.weights` if set, otherwise 1 for real tokens and 0 for padding."""
    if batch.weights is not None:
        return batch.weights
    if batch.target_seg is None:
        return torch.ones(batch.target.shape[:2], device=batch.target.device)
    return (batch.target_seg != 0).to(torch.get_default_dtype())


def real_rows(
    h: Float[Tensor, "B T D"], labels: Int[Tensor, "B T"], weights: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "N D"], Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Return hidden states, labels and weights, with batch and time flattened to one axis of tokens.

    On a CPU, tokens with weight 0 are removed to save time. On other devices they are kept, because changing shapes
    would cost more time.
    """
    h, labels, weights = h.flatten(0, 1), labels.flatten(), weights.flatten()
    if h.device.type == "cpu" and not torch.compiler.is_compiling():
        keep = weights.nonzero().squeeze(-1)
        if keep.numel() < weights.numel():
            h, labels, weights = h[keep], labels[keep], weights[keep]
        require_data(bool((labels >= 0).all()), "labels: a negative label has a weight above 0; set its weight to 0")
        return h, labels, weights
    return h, labels.masked_fill(weights == 0, 0), weights
