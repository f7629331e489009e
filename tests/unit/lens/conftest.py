"""Untrained models of every task, built in memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.objectives import Classification, LanguageModelling, Objective, Translation
from regard.data.prepare import DataSpec
from regard.data.text import TSV, Corpus, Labelled, Lines
from regard.data.tokenizer import BPE, train
from regard.decoding.beam import Beam
from regard.models.build import build
from regard.models.encoder_only import SentenceClassifier
from regard.recipe.recipe import Recipe
from regard.runs.trained_model import TrainedModel
from regard.testing import tiny
from regard.training.spec import TrainSpec

TEXTS = ["one two three four", "five six seven", "eight nine ten eleven", "two five eight"] * 4
TASKS: dict[str, tuple[Objective, type[Corpus], Any]] = {
    "translator": (Translation(), TSV, tiny.encoder_decoder()),
    "recurrent": (Translation(), TSV, tiny.recurrent()),
    "language_model": (LanguageModelling(), Lines, tiny.decoder_only()),
    "classifier": (Classification(labels=("no", "perhaps", "yes")), Labelled, tiny.encoder_only(SentenceClassifier(3))),
}
Make = Callable[..., TrainedModel]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that builds an untrained run: `make("translator", decode=Beam(3))`."""
    tokenizer = train(BPE(vocab=280), TEXTS)

    def built(name: str, **changes: Any) -> TrainedModel:
        objective, corpus, spec = TASKS[name]
        data = DataSpec((corpus(str(tmp_path / "none")),), objective=objective, max_len=64)
        recipe = Recipe(replace(spec, vocab=tokenizer.size), data, TrainSpec(), changes.pop("decode", Beam(3)))
        torch.manual_seed(1)
        model = build(recipe.model, seed=1).eval()
        tokenizers = dict.fromkeys(objective.encoded, tokenizer)
        return TrainedModel(tmp_path, recipe, model, tokenizers, 1, {}, True)

    return built
