"""Tiny models with a byte tokenizer, for tests of the export."""

from typing import Any

import torch

from regard import build
from regard.data.tokenizer import Bytes, train
from regard.inference.export import Trained
from regard.tree import replace_at

from .copying import randomise

BYTES = train(Bytes(), [])


def trained(spec: Any, seed: int = 0, scale: float = 0.15) -> Trained:
    """Return a model with random weights and a byte tokenizer."""
    model = build(replace_at(spec, "vocab", BYTES.size), seed=seed)
    randomise(model, scale, seed)
    return Trained(model.eval(), BYTES, BYTES, 3, 7)


def same(trained: Trained, before: dict[str, torch.Tensor]) -> bool:
    """Return whether the weights are unchanged."""
    now = trained.model.state_dict()
    return all(torch.equal(now[name], weight) for name, weight in before.items())
