"""Gradient accumulation against one large batch, for every variant: which are equal, and which are not."""

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
# Their auxiliary losses are means over the tokens of a batch: how far the gradient is from that of the large batch.
UNEQUAL = {"mixture_of_experts", "switch", "universal_act"}


def gradient(model: torch.nn.Module, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """As training computes it (`training.program.Update`): the mean loss over all labels, auxiliary losses by share."""
    model.zero_grad()
    losses = [model.loss(batch) for batch in batches]  # type: ignore[reportCallIssue]
    labels = sum(loss.tokens for loss in losses)
    for loss in losses:
        (loss.total / labels + loss.aux * loss.tokens / labels).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", VARIANTS)
def test_accumulation_equals_the_large_batch_but_where_a_loss_is_a_mean_of_the_batch(name: str) -> None:
    base = replace(tiny.narang(depth=2 if name in UNEQUAL else 1, d_model=48, heads=12), dropout=0.0)
    try:
        spec = apply(name, base)
    except SpecError:
        pytest.skip("does not apply to this base")
    # Nothing is left to chance: neither noise in the router nor whether a second expert is used.
    spec = swap(spec, Switch, lambda branch: replace(branch, jitter=0.0))
    spec = swap(spec, MixtureOfExperts, lambda branch: replace(branch, threshold=0.0))
    model = build(spec, seed=3).double().train()
    whole = gradient(model, [translation(PAIRS)])
    apart = gradient(model, [translation(PAIRS[:1]), translation(PAIRS[1:])])
    largest = max(float(one.abs().max()) for one in whole.values())
    difference = max(float((whole[key] - apart[key]).abs().max()) for key in whole) / largest
    if name in UNEQUAL:
        assert difference > 1e-7, "equal after all: take it off the list, and the exception out of the documentation"
    else:
        assert difference < 1e-10
