"""Assembling a training run: settings of the recipe, weights of a parent run, reproducible results."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.data.prepare import Prepared, prepare
from regard.models import cost as costs
from regard.models.base import Model, ModelSpec
from regard.recipe.recipe import Recipe
from regard.runs.assemble import _grown, assemble, forward_flops, held_out, keep_compiled_code, measure_of
from regard.runs.request import request_from_options
from regard.runs.resolve import resolve
from regard.training.checkpoint import CheckpointPolicy, RunFolder
from regard.training.trainer import Trainer

CPU = torch.device("cpu")
SMALL = ("model.d_model=16", "model.heads=2", "model.encoder.depth=1", "model.decoder.depth=1")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.tsv"
    path.write_text("".join(f"a{n % 7} b{n % 5} c\tx{n % 7} y{n % 5}\n" for n in range(200)))
    return path


def resolved(text: Path, *changes: str) -> tuple[Recipe, Prepared]:
    settings = ["train.steps=4", "train.validate_every=2", *changes]
    request = request_from_options(tsv=text, preset="transformer_small", changes=[*settings, *SMALL])
    data = prepare(request.data, text.parent / "data", seed=1)
    return resolve(request, data, CPU, lambda _: None), data


def trainer_in(folder: Path, recipe: Recipe, data: Prepared, **settings: Any) -> Trainer:
    folder.mkdir(exist_ok=True)
    return assemble(recipe, data, RunFolder(folder), CPU, (), measure_of(recipe, data), **settings)


def weights(model: Model) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def test_two_runs_of_a_recipe_have_equal_weights(text: Path, tmp_path: Path) -> None:
    recipe, data = resolved(text)
    trainers = [trainer_in(tmp_path / name, recipe, data) for name in "ab"]
    for trainer in trainers:
        assert trainer.fit().finished
    for a, b in zip(*(weights(trainer.model) for trainer in trainers), strict=True):
        assert torch.equal(a, b)
    assert trainers[0].progress.scores == trainers[1].progress.scores


def test_flops_of_long_texts_are_counted_in_short_texts(
    text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A layer that runs token by token would take half a minute for a text of a thousand tokens."""
    lengths: list[int] = []

    def counted(spec: ModelSpec, length: int) -> costs.Cost:
        lengths.append(length)
        return cost(spec, length)

    cost = costs.cost
    recipe, data = resolved(text)
    data.survey.ids = dict.fromkeys(data.survey.ids, 1000 * data.survey.kept)
    monkeypatch.setattr(costs, "cost", counted)
    assert forward_flops(recipe, data) == pytest.approx(cost(recipe.model, 1000).flops_per_token)
    assert max(lengths) < 100


def test_a_checkpoint_policy_without_final_weights_writes_none(text: Path, tmp_path: Path) -> None:
    recipe, data = resolved(text)
    trainer = trainer_in(tmp_path / "run", recipe, data, checkpoints=CheckpointPolicy(final=False))
    assert trainer.fit().finished
    assert trainer.folder.steps() == [2]
    assert not trainer.folder.final.exists()


def test_a_checkpoint_policy_spaces_checkpoints(text: Path, tmp_path: Path) -> None:
    recipe, data = resolved(text)
    trainer = trainer_in(tmp_path / "run", recipe, data, checkpoints=CheckpointPolicy(min_seconds=1e6, final=False))
    assert not trainer.fit(lambda: "enough" if trainer.progress.step == 3 else None).finished
    assert trainer.folder.steps() == []


def test_validation_measures_the_metrics_of_the_text(text: Path, tmp_path: Path) -> None:
    recipe, data = resolved(text)
    measure, model = measure_of(recipe, data), trainer_in(tmp_path / "run", recipe, data).model
    assert measure is not None
    assert {"loss", "perplexity", "bleu", "chrf"} <= measure(model.eval()).keys()
    likelihood = measure_of(recipe, data, decode=0)
    assert likelihood is not None
    assert "bleu" not in likelihood(model)


def test_without_validation_text_nothing_is_measured(text: Path) -> None:
    recipe, data = resolved(text)
    nothing: Any = data
    object.__setattr__(nothing, "valid", None)
    assert held_out(recipe, nothing) is None
    assert measure_of(recipe, nothing) is None


def test_rows_of_new_classes_keep_their_initial_weights() -> None:
    trained, initial = {"head": torch.ones(2, 3), "same": torch.zeros(4)}, {"head": torch.full((4, 3), 7.0)}
    grown = _grown(trained, initial | {"same": torch.ones(4)})
    assert torch.equal(grown["head"], torch.cat([torch.ones(2, 3), torch.full((2, 3), 7.0)]))
    assert torch.equal(grown["same"], torch.zeros(4))


def test_compiled_code_is_stored_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is restored afterwards
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "regard-compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
