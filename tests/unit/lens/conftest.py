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
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.models.encoder_only import SentenceClassifier
from regard.nn.branches.experts import MixtureOfExperts
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.linformer import Linformer
from regard.nn.branches.self_attention import SelfAttention
from regard.recipe.recipe import Recipe
from regard.runs.trained_model import TrainedModel
from regard.testing import tiny
from regard.training.spec import TrainSpec
from regard.tree import swap

TEXTS = ["one two three four", "five six seven", "eight nine ten eleven", "two five eight"] * 4
ONE_SEQUENCE = DecoderOnlyTranslator(vocab=tiny.VOCAB, d_model=16, heads=4, decoder=tiny.decoder_only().decoder)
EXPERTS = swap(tiny.encoder_decoder(), FeedForward, lambda _: MixtureOfExperts(4, 24))
MIXTURES = swap(tiny.encoder_only(SentenceClassifier(3)), SelfAttention, lambda _: Linformer(max_len=64, rank=3))
TASKS: dict[str, tuple[Objective, Callable[[str], Corpus], Any]] = {
    "translator": (Translation(), TSV, tiny.encoder_decoder()),
    "recurrent": (Translation(), TSV, tiny.recurrent()),
    "convs2s": (Translation(), TSV, tiny.convs2s()),
    "bytenet": (Translation(), TSV, tiny.bytenet()),
    "one_sequence": (Translation(), TSV, ONE_SEQUENCE),
    "experts": (Translation(), TSV, EXPERTS),
    "mixtures": (Classification(labels=("no", "perhaps", "yes")), Labelled, MIXTURES),
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
