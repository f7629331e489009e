"""Contrastive attribution: gradient x input of a difference of logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.batch import translation
from regard.errors import DataError
from regard.inspection.attribution import contrast, recorded_embeddings
from regard.models.base import LanguageModel
from regard.testing import laws, tiny

NAMES = ["encoder_decoder", "decoder_only", "recurrent", "convs2s", "bytenet"]


def built(name: str) -> tuple[LanguageModel, Any]:
    spec = tiny.families()[name]
    model = laws.Subject(spec).own_model()
    assert isinstance(model, LanguageModel)
    return model, tiny.collate(spec, tiny.examples(spec, 1))


@pytest.mark.parametrize("name", NAMES)
def test_contributions_are_gradient_times_input(name: str) -> None:
    """Each contribution is the derivative of the difference when the embedding of its token is scaled."""
    model, batch = built(name)
    scores = contrast(model, batch, 1, 7, 9)
    with recorded_embeddings(model) as embeddings, torch.no_grad():
        model.logits(batch)
        values = dict(embeddings)
    assert scores.keys() == values.keys()

    def difference(side: str, position: int, factor: float) -> float:
        scaled = {name: x.detach().clone() for name, x in values.items()}
        scaled[side][:, position] *= factor
        model.__dict__["embed"] = lambda which, *_: scaled[which]
        try:
            with torch.no_grad():
                logits: Tensor = model.logits(batch)[0, 1]
        finally:
            del model.__dict__["embed"]
        return float(logits[7] - logits[9])

    for side, score in scores.items():
        assert score.shape == values[side].shape[:2]
        for position in range(score.shape[1]):
            slope = (difference(side, position, 1 + 1e-5) - difference(side, position, 1 - 1e-5)) / 2e-5
            assert float(score[0, position]) == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_later_tokens_of_the_target_contribute_nothing() -> None:
    model, _ = built("encoder_decoder")
    batch = translation([([5, 6, 7], [8, 9, 10, 11])])
    scores = contrast(model, batch, 1, 7, 9)
    assert bool((scores["target"][0, 2:] == 0).all())
    assert bool((scores["target"][0, :2] != 0).all())
    assert bool((contrast(model, batch, 1, 9, 7)["source"] == -scores["source"]).all())


def test_the_model_is_left_as_it_was() -> None:
    model, batch = built("encoder_decoder")
    model.train()
    contrast(model, batch, 0, 7, 9)
    assert model.training
    assert "embed" not in vars(model)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("position", "token", "foil"), [(99, 5, 6), (-1, 5, 6), (0, 5, 99), (0, -1, 6)])
def test_positions_and_tokens_that_do_not_exist_give_a_sentence(position: int, token: int, foil: int) -> None:
    model, batch = built("encoder_decoder")
    with pytest.raises(DataError, match=r"position of the target|ids of the vocabulary"):
        contrast(model, batch, position, token, foil)
