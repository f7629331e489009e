"""Validation counts degenerate translations and uses the length limit of the recipe."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import preset
from regard.data.batching import Buckets
from regard.data.objectives import Translation
from regard.data.prepare import prepare
from regard.decoding.beam import Beam
from regard.decoding.length_limit import LengthLimit, fit
from regard.evaluation.validation import HeldOut, measured, validate
from regard.inference.text import Output, Texts
from regard.models.base import Classifier
from regard.models.build import build
from regard.recipe.recipe import request_from_record
from regard.runs.assemble import measure_of
from regard.runs.request import request_from_options
from regard.runs.resolve import resolve

LOOP, PLAIN = (7,) * 12, tuple(range(5, 17))


def test_degenerate_outputs_are_counted_under_the_limit_of_the_training_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length limit is in the recipe, and validation translates with it."""
    (tmp_path / "text").write_text("".join(f"{'ab ' * (i % 5 + 1)}\t{'xy ' * (i % 5 + 2)}\n" for i in range(40)))
    table = {"train": [{"kind": "tsv", "path": str(tmp_path / "text")}], "held_out": 8, "tokenizer": "bytes"}
    request = request_from_record({"data": table})
    data = prepare(request.data, tmp_path / "data", seed=1)
    messages: list[str] = []
    recipe = resolve(request, data, torch.device("cpu"), messages.append)
    lengths = [data.train[0][name].lengths for name in ("source", "target")]
    assert recipe.length_limit == fit(lengths[0], lengths[1] - 2)
    assert f"length limit of a translation: {recipe.length_limit}" in messages

    limits: list[LengthLimit | None] = []
    outputs = [(LOOP, False), (PLAIN, False), (LOOP, True), *[(PLAIN, True)] * 5]

    def translate(self: Texts, *_: Any) -> Iterator[list[Output]]:
        limits.append(self.length_limit)
        return iter([Output("x", 0.0, 0.0, (), ended, ids)] for ids, ended in outputs)

    monkeypatch.setattr(Texts, "translate", translate)
    assert data.valid is not None
    held_out = HeldOut(
        Translation(), data.valid, data.valid_texts, data.tokenizers, Buckets(999), 1, 256, recipe.length_limit
    )
    model = build(preset("transformer_tiny", vocab=300)).eval()
    values = validate(model, held_out, Beam(1), 8, measured(Translation(), "13a"))
    assert {"loss", "bleu", "chrf", "exact_match", "perplexity"} <= values.keys()
    assert (values["repeating"], values["unfinished"]) == (25.0, 25.0)
    assert limits == [recipe.length_limit]


def test_texts_to_classify_share_a_batch_only_up_to_a_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 texts of 4,000 tokens would need many times the memory of a batch of training."""
    text = tmp_path / "text"
    text.write_text("".join(f"{'ab'[i % 2]}\t{'xy ' * (100 if i < 40 else 1)}{i}\n" for i in range(60)))
    data = {"objective": "classification", "tokenizer": "bytes", "batching": {"kind": "buckets", "tokens": 320}}
    options: dict[str, Any] = {"labelled": text, "changes": ["train.steps=4", "data.held_out=30"]}
    (tmp_path / "recipe.json").write_text(json.dumps({"data": data}))
    request = request_from_options(recipe=tmp_path / "recipe.json", **options)
    prepared = prepare(request.data, tmp_path / "data", seed=1)
    recipe = resolve(request, prepared, torch.device("cpu"), lambda _: None)
    model, shapes = build(recipe.model), list[torch.Size]()
    assert isinstance(model, Classifier)
    scores = model.scores
    monkeypatch.setattr(model, "scores", lambda batch, *more: shapes.append(batch.target.shape) or scores(batch, *more))
    measure = measure_of(recipe, prepared)
    assert measure is not None
    assert "accuracy" in measure(model)
    assert max(rows * tokens for rows, tokens in shapes) <= 4 * 320
    assert any(tokens > 200 for _, tokens in shapes)
