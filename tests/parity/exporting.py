"""Tiny models as a run would have them, to be exported: their words are bytes."""

from typing import Any

import torch

from regard import build
from regard.data.tokenizer import Bytes, train
from regard.inference.export import Trained
from regard.tree import replace_at

from .copying import randomise

BYTES = train(Bytes(), [])


def trained(spec: Any, seed: int = 0, scale: float = 0.15) -> Trained:
    """A model with disturbed weights, over bytes."""
    model = build(replace_at(spec, "vocab", BYTES.size), seed=seed)
    randomise(model, scale, seed)
    return Trained(model.eval(), BYTES, BYTES, 3, 7)


def same(trained: Trained, before: dict[str, torch.Tensor]) -> bool:
    """Whether the weights are what they were."""
    now = trained.model.state_dict()
    return all(torch.equal(now[name], weight) for name, weight in before.items())
