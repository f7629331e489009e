"""Importance of heads: gradients against finite differences, and ablation against zeroed weights."""

from typing import Any

import pytest
import torch

from regard.inspection.importance import (
    head_values,
    importance_by_ablation,
    importance_by_gradient,
    loss_without,
    mean_loss,
)
from regard.inspection.interventions import Head, all_heads, attention_layers, head_counts, scaled_heads
from regard.models.base import Model, ModelSpec
from regard.testing import laws, tiny

NAMES = ["encoder_decoder", "decoder_only", "recurrent", "convs2s", "sentence_classifier"]


def built(name: str) -> tuple[ModelSpec, Model]:
    spec = tiny.families()[name]
    return spec, laws.Subject(spec).own_model()


@pytest.mark.parametrize("name", NAMES)
def test_importance_by_gradient_is_the_mean_of_absolute_derivatives_of_each_text(name: str) -> None:
    spec, model = built(name)
    examples = tiny.examples(spec, 3)
    head = all_heads(model)[-1]
    derivatives, step = [], 1e-5
    labels = sum(float(model.loss(tiny.collate(spec, [each])).tokens) for each in examples)
    for each in examples:
        batch, totals = tiny.collate(spec, [each]), []
        for sign in (1, -1):
            with scaled_heads(model, {head.kind: {head[1:]: 1.0 + sign * step}}), torch.no_grad():
                totals.append(float(model.loss(batch).total))
        derivatives.append(abs(totals[0] - totals[1]) / (2 * step))
    found = importance_by_gradient(model, [tiny.collate(spec, examples[:2]), tiny.collate(spec, examples[2:])])
    value = found[head.kind][head.layer][head.head]
    assert float(value) == pytest.approx(sum(derivatives) / labels, rel=1e-5)
    assert {kind: [len(layer) for layer in layers] for kind, layers in found.items()} == head_counts(model)


def test_gradients_of_parameters_are_left_alone() -> None:
    spec, model = built("encoder_decoder")
    model.train()
    frozen = next(model.parameters()).requires_grad_(False)
    importance_by_gradient(model, [tiny.collate(spec, tiny.examples(spec, 2))])
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad is (parameter is not frozen) for parameter in model.parameters())


def test_importance_by_ablation_is_the_increase_of_the_loss() -> None:
    spec, model = built("encoder_decoder")
    batches = [tiny.collate(spec, tiny.examples(spec, 2, seed)) for seed in (1, 2)]
    losses = [model.loss(batch) for batch in batches]
    whole = float(sum(loss.nll for loss in losses)) / float(sum(loss.tokens for loss in losses))
    assert mean_loss(model, batches) == pytest.approx(whole)
    asked: list[Head] = []
    found = importance_by_ablation(model, batches, asked.append)
    assert asked == all_heads(model)
    head = Head("decoder.cross", 1, 2)
    module: Any = attention_layers(model)["decoder.cross"][1].module
    assert float(found["decoder.cross"][1][2]) == pytest.approx(loss_without(model, batches, [head]) - whole)
    with torch.no_grad():
        module.output.weight[:, 8:12] = 0.0
    assert float(found["decoder.cross"][1][2]) == pytest.approx(mean_loss(model, batches) - whole)


def test_heads_are_ordered_by_value_and_layers_can_be_normalised() -> None:
    importance = {"a": [torch.tensor([3.0, 4.0])], "b": [torch.tensor([0.6, 0.1])]}
    assert list(head_values(importance)) == [Head("b", 0, 1), Head("b", 0, 0), Head("a", 0, 0), Head("a", 0, 1)]
    scaled = head_values(importance, by_layer=True)
    assert scaled[Head("a", 0, 0)] == pytest.approx(0.6)
    assert list(scaled) == [Head("b", 0, 1), Head("a", 0, 0), Head("a", 0, 1), Head("b", 0, 0)]
