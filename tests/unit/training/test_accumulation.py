"""Gradient accumulation against one large batch, for every variant."""

from dataclasses import replace

import pytest
import torch

from regard.batch import Batch, translation
from regard.errors import SpecError
from regard.models.build import build
from regard.nn.branches.experts import MixtureOfExperts, Switch
from regard.testing import tiny
from regard.tree import swap
from regard.variants import VARIANTS, apply

PAIRS = [([5, 6, 7, 8, 9], [8, 9]), ([4, 5], [6, 7, 8, 9, 10, 11]), ([9, 8, 7], [5, 5]), ([6], [7, 4, 4, 12])]
# Variants whose auxiliary losses are means over the tokens of a batch, so that their gradients differ.
UNEQUAL = {"mixture_of_experts", "switch", "universal_act"}


def gradient(model: torch.nn.Module, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """As in `training.executor.Update`: the mean loss over all labels, auxiliary losses weighted by labels."""
    model.zero_grad()
    losses = [model.loss(batch) for batch in batches]  # type: ignore[reportCallIssue]
    labels = sum(loss.tokens for loss in losses)
    for loss in losses:
        (loss.total / labels + loss.aux * loss.tokens / labels).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", VARIANTS)
def test_accumulation_equals_the_large_batch_except_for_auxiliary_losses(name: str) -> None:
    base = replace(tiny.narang(depth=2 if name in UNEQUAL else 1, d_model=48, heads=12), dropout=0.0)
    try:
        spec = apply(name, base)
    except SpecError:
        pytest.skip("does not apply to this base")
    # No random numbers, neither for noise in the router nor for the use of a second expert.
    spec = swap(spec, Switch, lambda branch: replace(branch, jitter=0.0))
    spec = swap(spec, MixtureOfExperts, lambda branch: replace(branch, threshold=0.0))
    model = build(spec, seed=3).double().train()
    large = gradient(model, [translation(PAIRS)])
    accumulated = gradient(model, [translation(PAIRS[:1]), translation(PAIRS[1:])])
    largest = max(float(tensor.abs().max()) for tensor in large.values())
    difference = max(float((large[key] - accumulated[key]).abs().max()) for key in large) / largest
    if name in UNEQUAL:
        assert difference > 1e-7, "equal after all: remove the variant from UNEQUAL and from the documentation"
    else:
        assert difference < 1e-10
