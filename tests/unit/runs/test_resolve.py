"""Resolving a recipe: missing settings are chosen from the data, and each choice is reported."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.data.batching import Buckets
from regard.data.objectives import Classification, LanguageModelling, Summarization
from regard.data.prepare import DataSpec, prepare
from regard.data.text import Labelled
from regard.data.tokenizer import BPE
from regard.errors import SpecError
from regard.evaluation.text_metrics import Rouge
from regard.evaluation.validation import criterion_of, measured
from regard.nn.branches.linformer import Linformer
from regard.nn.branches.self_attention import SelfAttention
from regard.planner.candidates import of_ngrams
from regard.recipe.recipe import Recipe
from regard.runs.request import request_from_options
from regard.runs.resolve import _window_length, labels_after, resolve
from regard.runs.trained_model import TrainedModel
from regard.tree import walk

LABELLED = "".join(
    f"{label}\tthe {word} number {n}\n" for n in range(30) for label, word in [("x", "odd"), ("y", "even")]
)


def resolved(tmp_path: Path, *changes: str) -> Recipe:
    """Return the recipe planned for a small labelled text."""
    text = tmp_path / "labels.tsv"
    text.write_text(LABELLED)
    request = request_from_options(labelled=text, changes=["train.steps=5", *changes])
    data = prepare(request.data, tmp_path / "data", seed=1)
    return resolve(request, data, torch.device("cpu"), lambda _: None)


def test_a_setting_of_attention_selects_a_model_with_attention(tmp_path: Path) -> None:
    assert of_ngrams(resolved(tmp_path).model)
    for change in ("heads=2", "attention_dropout=0.2"):
        model: Any = resolved(tmp_path, change).model
        assert any(isinstance(part, SelfAttention) for part in walk(model))
        assert str(getattr(model, change.split("=")[0])) == change.split("=")[1]


@pytest.mark.parametrize("branch", [{"kind": "linformer", "rank": 8}, {"kind": "self_attention"}])
def test_long_classifiers_are_padded_on_a_gpu_and_have_weights_for_every_position(
    tmp_path: Path, branch: dict[str, Any]
) -> None:
    text = tmp_path / "labels.tsv"
    text.write_text(LABELLED + f"x\t{'odd ' * 400}\n")
    block = {"kind": "block", "branches": [branch, {"kind": "feedforward"}]}
    stack: dict[str, Any] = {"kind": "plain", "depth": 2, "pattern": [block]}
    if branch["kind"] == "self_attention":
        stack["attention_pattern"] = {"kind": "big_bird"}
    model = {"kind": "encoder_only", "d_model": 16, "heads": 2, "encoder": stack}
    model["task"] = {"kind": "sentence_classifier", "classes": 2}
    recipe = tmp_path / "recipe.json"
    data = {"objective": "classification", "tokenizer": "bytes", "max_len": 1000}
    recipe.write_text(json.dumps({"model": model, "data": data}))
    request = request_from_options(labelled=text, recipe=recipe, steps=5)
    prepared = prepare(request.data, tmp_path / "data", seed=1)
    chosen = resolve(request, prepared, torch.device("cuda"), lambda _: None)
    assert isinstance(chosen.data.batching, Buckets)
    assert [part.max_len for part in walk(chosen.model) if isinstance(part, Linformer)] == (
        [1002] if branch["kind"] == "linformer" else []
    )


def test_the_vocabulary_of_a_language_model_is_that_of_one_language(tmp_path: Path) -> None:
    text = tmp_path / "text.tsv"
    text.write_text("".join(f"a{n} b\tc{n} d\n" for n in range(60)))
    for tokenizer in ([], ["data.tokenizer=bpe"]):
        requests = [
            request_from_options(text=text, changes=tokenizer),
            request_from_options(tsv=text, changes=tokenizer),
        ]
        prepared = [prepare(each.data, tmp_path / f"{n}{len(tokenizer)}", seed=1) for n, each in enumerate(requests)]
        assert [data.spec.tokenizer for data in prepared] == [BPE(languages=1), BPE(languages=2)]


def test_choices_are_reported_with_their_reasons(tmp_path: Path) -> None:
    text = tmp_path / "text.tsv"
    text.write_text("".join(f"a{n} b\tc{n} d e f\n" for n in range(60)))
    request = request_from_options(tsv=text, changes=["train.steps=5"])
    report: list[str] = []
    recipe = resolve(request, prepare(request.data, tmp_path / "data", seed=1), torch.device("cpu"), report.append)
    topics = [sentence.partition(":")[0] for sentence in report]
    assert {"vocabulary", "model", "batch size", "peak learning rate", "length limit of a translation"} <= {*topics}
    assert recipe.train.steps == 5
    assert recipe.train.criterion == "bleu"
    assert recipe.data.batching is not None
    assert request.data.batching is None


def test_settings_of_the_request_are_kept(tmp_path: Path) -> None:
    changes = ["train.optimizer=adamw", "train.optimizer.learning_rate=0.02", "data.batching.tokens=500", "d_model=48"]
    recipe = resolved(tmp_path, *changes)
    assert recipe.train.optimizer is not None
    assert recipe.train.optimizer.learning_rate == 0.02
    assert getattr(recipe.data.batching, "tokens", None) == 500
    assert getattr(recipe.model, "d_model", None) == 48


def test_windows_of_a_stream_suit_device_and_length() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [_window_length(cpu, tokens) for tokens in (50, 800, 10**7)] == [16, 100, 128]
    assert [_window_length(cuda, tokens) for tokens in (800, 10**5, 10**6)] == [100, 256, 512]


def labelled(path: Path, *labels: str) -> Labelled:
    path.write_text("".join(f"{label}\tsome text\n" for label in labels))
    return Labelled(str(path))


def parent_with(*labels: str) -> TrainedModel:
    """Return a parent run that has only labels."""
    parent: Any = object.__new__(TrainedModel)
    parent.path = Path("runs/parent")
    parent.recipe = SimpleNamespace(data=SimpleNamespace(objective=Classification(labels)))
    return parent


def test_fine_tuning_appends_new_labels_to_those_of_its_parent(tmp_path: Path) -> None:
    report: list[str] = []
    data = DataSpec((labelled(tmp_path / "text.tsv", "d", "a", "c"),), objective=Classification())
    assert labels_after(parent_with("b", "a"), data, report.append) == ("b", "a", "c", "d")
    assert report == [
        "labels: 2 new, untrained so far: c, d",
        "labels: 1 of runs/parent do not occur in this text, and are kept: b",
    ]


def test_fine_tuning_refuses_other_labels(tmp_path: Path) -> None:
    data = DataSpec((labelled(tmp_path / "text.tsv", "a"),), objective=Classification(("a", "b")))
    with pytest.raises(SpecError, match="keeps the classes of runs/parent; leave it out, or begin with"):
        labels_after(parent_with("b", "a"), data, print)


@pytest.mark.parametrize("installed", [True, False])
def test_checkpoints_of_a_summarizer_are_ranked_by_rouge_if_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(Rouge, "installed", lambda *_: installed)
    text = tmp_path / "text.tsv"
    text.write_text("".join(f"a{n} b c d e f\tc{n} d e f\n" for n in range(60)))
    request = request_from_options(tsv=text, task="summarization", changes=["train.steps=5"])
    assert request.data.objective == Summarization()
    report: list[str] = []
    data = prepare(request.data, tmp_path / "data", seed=1)
    recipe = resolve(request, data, torch.device("cpu"), report.append)
    assert recipe.train.criterion == ("rougeL" if installed else "chrf")
    reason = "by ROUGE-L, the usual metric of summaries" if installed else "by chrF, because ROUGE-L needs rouge-score"
    assert any(reason in sentence for sentence in report)
    names = [each.name for each in measured(data.objective, "13a")]
    assert names == (["rougeL", "rouge1", "rouge2", "perplexity"] if installed else ["perplexity"])
    chosen = replace(recipe.train, criterion="rouge2")
    if not installed:
        with pytest.raises(SpecError, match=r"train.criterion: 'rouge2' needs the package rouge_score"):
            criterion_of(chosen, data.objective)
    else:
        assert criterion_of(chosen, data.objective).name == "rouge2"


def test_a_task_overrides_the_usual_one_for_the_files_and_is_given_once(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\nobjective = { kind = "language_model", unit = "lines" }\n')
    request = request_from_options(text="a", recipe=recipe, task="language_model")
    assert request.data.objective == LanguageModelling("lines")
    with pytest.raises(SpecError, match=r"^--task: unknown task 'summarisation'; did you mean 'summarization'"):
        request_from_options(tsv="a", task="summarisation")
    with pytest.raises(SpecError, match=r"^--task: sets data.objective, which is also given"):
        request_from_options(tsv="a", task="summarization", changes="data.objective=translation")
    with pytest.raises(SpecError, match="a corpus of kind 'tsv' does not fit the objective 'classification'"):
        request_from_options(tsv="a", task="classification")
