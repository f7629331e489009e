"""Runs of an earlier version, written before settings and kinds were renamed: they load, resume and translate the same.

`tests/stored/runs-before-17.tar.xz` was written at commit fc7b9f1: six small runs, their outputs at that commit
(`expected.json`), and the fields of every kind of that version (`schema.json`).
"""

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from regard import catalogue
from regard.aliases import FIELDS, KINDS, VALUES, current_field, current_kind, former
from regard.batch import Batch
from regard.errors import SpecError
from regard.models.baselines.attention_score import DotScore
from regard.models.baselines.rnn import RecurrentDecoder
from regard.recipe import recipe
from regard.runs.train import resume
from regard.runs.trained_model import load
from regard.training.executor import StepScalars, Update
from regard.tree import edit, get_at, hints

STORED = Path(__file__).parent.parent / "stored" / "runs-before-17.tar.xz"
PARTS = catalogue.PARTS | recipe.PARTS


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(STORED) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def expected(stored: Path) -> dict[str, Any]:
    return json.loads((stored / "expected.json").read_text())


def test_a_stored_translator_translates_the_same(stored: Path, expected: dict[str, Any]) -> None:
    run = load(stored / "translator", "cpu")
    outputs = [run.translate(source) for source, _ in expected["texts"]]
    assert [getattr(output, "text", output) for output in outputs] == expected["runs"]["translator"]["outputs"]


@pytest.mark.parametrize("name", ["translator", "recurrent", "convolutional"])
def test_stored_translators_score_the_same(name: str, stored: Path, expected: dict[str, Any]) -> None:
    scores = load(stored / name, "cpu").score([tuple(pair) for pair in expected["texts"]])
    assert [score.log_prob for score in scores] == pytest.approx(expected["runs"][name]["scores"], abs=1e-3)


def test_a_stored_language_model_with_a_window_scores_the_same(stored: Path, expected: dict[str, Any]) -> None:
    run = load(stored / "window", "cpu")
    assert (
        get_at(run.recipe.model, "decoder.sight") == get_at(run.recipe.model, "decoder.attention_pattern") is not None
    )
    scores = run.score([source for source, _ in expected["texts"]])
    assert [score.log_prob for score in scores] == pytest.approx(expected["runs"]["window"]["scores"], abs=1e-3)


def test_a_stored_classifier_predicts_the_same(stored: Path, expected: dict[str, Any]) -> None:
    run = load(stored / "classifier", "cpu")
    for (source, _), old in zip(expected["texts"], expected["runs"]["classifier"]["classes"], strict=True):
        prediction = run.classify(source)
        assert prediction.label == old["label"]
        assert prediction.probabilities == pytest.approx(old["probabilities"], abs=1e-4)


def one_sequence(self: Update, batches: Sequence[Batch], scalars: StepScalars, seed: int) -> Tensor:
    """A step whose batches draw from one sequence of random numbers, as in versions without several processes."""
    torch.manual_seed(seed)
    return self.finish([self.backward(batch, scalars, number) for number, batch in enumerate(batches)], scalars)


def test_a_stored_unfinished_run_resumes_to_the_same_model(
    stored: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Update, "__call__", one_sequence)
    run = resume(stored / "stopped", "cpu")
    assert run.step == expected["runs"]["stopped"]["step"]
    scores = run.score([tuple(pair) for pair in expected["texts"]])
    # Other processors round differently over 130 steps.
    assert [score.log_prob for score in scores] == pytest.approx(expected["runs"]["stopped"]["scores"], abs=0.1)


def test_every_former_kind_and_field_is_known(stored: Path) -> None:
    schema: dict[str, list[str]] = json.loads((stored / "schema.json").read_text())
    for kind, names in schema.items():
        part = PARTS[current_kind(kind)]
        assert {current_field(part.kind, name) for name in names} <= set(hints(part)), kind


def test_aliases_name_existing_kinds_and_fields() -> None:
    assert all(new in PARTS and old not in PARTS for old, new in KINDS.items())
    for kind, names in FIELDS.items():
        fields = set(hints(PARTS[kind]))
        used = {old: new for old, new in names.items() if new in fields}
        assert used, kind
        assert not set(used) & fields, kind


def test_aliases_name_existing_values() -> None:
    for kind, fields in VALUES.items():
        for field, values in fields.items():
            current = get_args(hints(PARTS[kind])[field])
            assert set(values.values()) <= set(current)
            assert not set(values) & set(current)


def test_former_values_work_in_edits_and_json() -> None:
    attention = {"kind": "dot"}
    record = {"kind": "recurrent_decoder", "attention": attention, "input_feeding": "found"}
    decoder = recipe.read(record, RecurrentDecoder, "decoder", PARTS)
    assert decoder == RecurrentDecoder(attention=DotScore(), input_feeding="context")
    assert edit(RecurrentDecoder(attention=DotScore()), {"input_feeding": "found"}) == decoder
    assert former(record | {"input_feeding": "context"})["feeding"] == "found"


def test_former_names_work_in_edits_and_json() -> None:
    beam = recipe.read({"kind": "beam", "beams": 3}, recipe.Search, "decode", PARTS)
    assert beam == recipe.Beam(beam_size=3)
    assert edit(beam, {"beams": 4}) == recipe.Beam(beam_size=4)


def test_a_setting_under_both_names_is_refused() -> None:
    with pytest.raises(SpecError, match=r"decode\.(beam_size|beams): beam_size is set twice"):
        recipe.read({"kind": "beam", "beams": 3, "beam_size": 3}, recipe.Search, "decode", PARTS)
    with pytest.raises(SpecError, match="beam_size: is set twice"):
        edit(recipe.Beam(), {"beams": 4, "beam_size": 5})


def test_former_restores_the_original_names() -> None:
    old = {"kind": "joined", "head": {"kind": "softmax", "smoothing": 0.1}, "more": [{"kind": "adamw", "rate": 1}]}
    new = {
        "kind": "decoder_only_translator",
        "head": {"kind": "softmax", "label_smoothing": 0.1},
        "more": [{"kind": "adamw", "learning_rate": 1}],
    }
    assert former(new) == former(old) == old
