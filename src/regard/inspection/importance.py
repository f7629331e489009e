"""The importance of attention heads for the loss of a model, by gradient and by ablation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from regard.batch import Batch
from regard.inspection.interventions import Head, all_heads, head_counts, scaled_heads, switched_off
from regard.inspection.record import evaluation
from regard.models.base import Model

Importance = dict[str, list[Float[Tensor, " H"]]]  # of every head: one tensor per layer, for each kind of attention


def importance_by_gradient(model: Model, batches: Iterable[Batch]) -> Importance:
    """Return sum_x |dL_x / dg| / n for every head (Michel et al. 2019), on batches that are not packed.

    L_x is the loss of text x, summed over its labels, and n is the number of labels. g is the factor of the head, at
    1. This estimates how much the loss per label changes if the head is switched off, and takes one backward pass.
    """
    counts = head_counts(model)
    totals: Importance = {kind: [torch.zeros(H) for H in heads] for kind, heads in counts.items()}
    labels = 0.0
    with without_gradients(model):
        for batch in batches:
            rows, on = batch.target.shape[0], batch.target.device
            gates = {
                k: [torch.ones(rows, H, device=on, requires_grad=True) for H in each] for k, each in counts.items()
            }
            flat = [gate for each in gates.values() for gate in each]
            with torch.enable_grad(), scaled_heads(model, gates):
                loss = model.loss(batch)
            labels += float(loss.tokens)
            sums = [total for each in totals.values() for total in each]
            for total, gradient in zip(sums, torch.autograd.grad(loss.total, flat), strict=True):
                total.add_(gradient.abs().sum(0).to("cpu", total.dtype))
    return {kind: [total / max(labels, 1.0) for total in each] for kind, each in totals.items()}


def importance_by_ablation(
    model: Model, batches: Sequence[Batch], progress: Callable[[Head], None] = lambda _: None
) -> Importance:
    """Return the increase of the loss per label if one head is switched off, for every head.

    `progress` is called with each head before it is switched off.
    """
    whole = mean_loss(model, batches)
    increases: Importance = {kind: [torch.zeros(H) for H in heads] for kind, heads in head_counts(model).items()}
    for head in all_heads(model):
        progress(head)
        increases[head.kind][head.layer][head.head] = loss_without(model, batches, [head]) - whole
    return increases


def mean_loss(model: Model, batches: Iterable[Batch]) -> float:
    """Return the negative log-likelihood per label, without dropout and label smoothing."""
    total = count = 0.0
    with evaluation(model):
        for batch in batches:
            loss = model.loss(batch)
            total, count = total + float(loss.nll), count + float(loss.tokens)
    return total / max(count, 1.0)


def loss_without(model: Model, batches: Iterable[Batch], heads: Iterable[Head]) -> float:
    """Return `mean_loss` with the given heads switched off."""
    with scaled_heads(model, switched_off(heads)):
        return mean_loss(model, batches)


def head_values(importance: Importance, by_layer: bool = False) -> dict[Head, float]:
    """Return the importance of every head, the least important first.

    With `by_layer`, the values of a layer are first divided by their Euclidean norm (Molchanov et al. 2017), as Michel
    et al. 2019 do for gradients, because gradients of different layers have different magnitudes.
    """
    values: dict[Head, float] = {}
    for kind, layers in importance.items():
        for n, layer in enumerate(layers):
            scaled = layer / layer.norm().clamp(min=1e-30) if by_layer else layer
            values |= {Head(kind, n, h): value for h, value in enumerate(scaled.tolist())}
    return dict(sorted(values.items(), key=lambda item: item[1]))


@contextmanager
def without_gradients(model: Model) -> Iterator[None]:
    """Context manager that disables dropout and the gradients of parameters, and restores both at the end."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with evaluation(model):
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
