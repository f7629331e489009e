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
    """Summed over the labels of a batch; divide by `tokens` summed over all of a step, never per batch."""

    total: Float[Tensor, ""]  # what is minimised, with smoothing, without aux
    tokens: Float[Tensor, ""]  # how many labels, by weight
    aux: Float[Tensor, ""]  # auxiliary terms of the parts
    nll: Float[Tensor, ""]  # the plain negative log-likelihood


def token_loss(
    head: Head, table: "Table | None", h: Float[Tensor, "B T D"], batch: Batch, losses: list[Tensor] | None
) -> Loss:
    """The loss of the head over all labels of a batch, and the auxiliary losses of the parts."""
    if batch.labels is None or batch.labels.shape != batch.target.shape:
        raise DataError("labels: the loss needs one label per target token")
    h, labels, weights = real_rows(h, batch.labels, label_weights(batch))
    scored = head.score(h, labels, weights, table)
    aux = sum(losses or (), scored.objective.new_zeros(()))
    return Loss(scored.objective, weights.sum(), aux, scored.nll)


def label_weights(batch: Batch) -> Float[Tensor, "B T"]:
    """The weight of every label: the given one, or 1 for real tokens."""
    if batch.weights is not None:
        return batch.weights
    if batch.target_seg is None:
        return torch.ones(batch.target.shape[:2], device=batch.target.device)
    return (batch.target_seg != 0).to(torch.get_default_dtype())


def real_rows(
    h: Float[Tensor, "B T D"], labels: Int[Tensor, "B T"], weights: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "N D"], Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Hidden states, labels and weights as flat rows.

    On a CPU, rows without weight are left out before the softmax; elsewhere the changing shape would cost more.
    """
    h, labels, weights = h.flatten(0, 1), labels.flatten(), weights.flatten()
    if h.device.type == "cpu" and not torch.compiler.is_compiling():
        keep = weights.nonzero().squeeze(-1)
        if keep.numel() < weights.numel():
            h, labels, weights = h[keep], labels[keep], weights[keep]
        require_data(bool((labels >= 0).all()), "labels: a negative label has a weight; give it weight 0")
        return h, labels, weights
    return h, labels.masked_fill(weights == 0, 0), weights
