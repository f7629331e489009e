"""Contrastive attribution equals InputXGradient of Captum."""

import pytest
import torch
from torch import Tensor

from regard.inspection.attribution import contrast, recorded_embeddings
from regard.models.base import LanguageModel
from regard.testing import laws, tiny

attr = pytest.importorskip("captum.attr")
pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", ["encoder_decoder", "recurrent"])
def test_contrast_equals_input_times_gradient(name: str) -> None:
    spec = tiny.families()[name]
    model = laws.Subject(spec).own_model()
    assert isinstance(model, LanguageModel)
    batch = tiny.collate(spec, tiny.examples(spec, 3))
    with recorded_embeddings(model) as embeddings, torch.no_grad():
        model.logits(batch)
        source, target = (embeddings[side].detach().requires_grad_() for side in ("source", "target"))

    def difference(source: Tensor, target: Tensor) -> Tensor:
        model.__dict__["embed"] = lambda side, *_: {"source": source, "target": target}[side]
        try:
            logits = model.logits(batch)[:, 2]
        finally:
            del model.__dict__["embed"]
        return logits[:, 7] - logits[:, 9]

    expected = attr.InputXGradient(difference).attribute((source, target))
    found = contrast(model, batch, 2, 7, 9)
    for side, score in zip(("source", "target"), expected, strict=True):
        torch.testing.assert_close(found[side], score.sum(-1).detach(), atol=1e-10, rtol=1e-10)
