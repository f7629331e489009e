"""Requests: command options become a recipe request, and invalid options are refused before text is read."""

from pathlib import Path
from typing import Any

import pytest

from regard.data.objectives import Classification, LanguageModelling, Translation
from regard.data.text import JSONL, TSV, Labelled, Lines, ParallelFiles
from regard.errors import RegardError, SpecError
from regard.recipe.recipe import RecipeRequest
from regard.runs.request import check_family, check_request, request_from_options
from regard.training.optim import AdamW, Muon


@pytest.mark.parametrize(
    ("options", "corpus", "objective"),
    [
        ({"source": "a.en", "target": "a.de"}, ParallelFiles("a.en", "a.de"), Translation()),
        ({"tsv": "a.tsv"}, TSV("a.tsv"), Translation()),
        ({"jsonl": Path("a.jsonl")}, JSONL("a.jsonl"), Translation()),
        ({"text": ["a.txt"]}, Lines("a.txt"), LanguageModelling()),
        ({"labelled": "a.tsv"}, Labelled("a.tsv"), Classification()),
    ],
)
def test_files_determine_the_objective(options: dict[str, Any], corpus: Any, objective: Any) -> None:
    request = request_from_options(**options)
    assert (request.data.train, request.data.objective) == ((corpus,), objective)


def test_several_files_are_one_corpus_each() -> None:
    request = request_from_options(tsv=["a.tsv", "b.tsv"], jsonl="c.jsonl", valid="v.tsv")
    assert request.data.train == (TSV("a.tsv"), TSV("b.tsv"), JSONL("c.jsonl"))
    assert request.data.valid == (TSV("v.tsv"),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no training text is given; give --source and --target"),
        ({"source": "a.en"}, "give both --source and --target"),
        ({"tsv": "a", "text": "b"}, "a run has one objective; files for language_model and translation"),
        ({"tsv": "a", "valid_source": "b"}, "give both --valid-source and --valid-target"),
        ({"tsv": "a", "valid": "v", "valid_source": "b", "valid_target": "c"}, "is a second validation text"),
        (
            {"tsv": "a", "time": 60.0, "changes": "train.time=30"},
            "--time: sets train.time, which is also given; leave one",
        ),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        request_from_options(**options)
    assert message in str(raised.value)


def test_options_override_a_recipe_file(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npreset = "transformer_small"\n[data]\ntrain = [{ kind = "tsv", path = "old.tsv" }]\n')
    request = request_from_options(recipe=recipe)
    assert request.data.train == (TSV("old.tsv"),)
    overridden = request_from_options(recipe=recipe, tsv="new.tsv", preset="transformer_tiny", time=60.0)
    assert overridden.data.train == (TSV("new.tsv"),)
    assert overridden.model == {"preset": "transformer_tiny"}
    assert overridden.train.time == 60.0


def test_a_request_survives_json(tmp_path: Path) -> None:
    request = request_from_options(
        tsv=tmp_path / "a.tsv", variants="rotary", changes=["decoder.depth=2", "train.steps=9"]
    )
    assert RecipeRequest.of(request.record()) == request


def test_edits_of_the_optimizer_apply_to_adamw_by_default(tmp_path: Path) -> None:
    text = tmp_path / "text.tsv"
    text.write_text("".join(f"a{n}\tb{n} c\n" for n in range(50)))
    assert request_from_options(tsv=text).train.optimizer is None
    assert request_from_options(tsv=text, changes=["train.optimizer.learning_rate=1e-3"]).train.optimizer == AdamW(
        learning_rate=1e-3
    )
    lines = request_from_options(text=text, changes=["train.optimizer.betas=[0.9, 0.95]"]).train.optimizer
    assert lines == AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    assert request_from_options(tsv=text, changes=["train.optimizer=muon"]).train.optimizer == Muon()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.criterion=bleu", "train.decode=0"], "needs translations; set train.decode above 0"),
        (["train.criterion=accuracy"], "train.criterion"),
        (["train.time=60", "train.validate_every=5"], "train.validate_every: has no effect with a time limit"),
        (["train.bleu_tokenize=latin"], "train.bleu_tokenize"),
        (["encoder.depht=2"], "depht"),
    ],
)
def test_a_wrong_request_is_refused_before_its_text_is_read(tmp_path: Path, changes: list[str], message: str) -> None:
    text = tmp_path / "text.tsv"
    text.write_bytes(b"\xff\xfe is not read")
    with pytest.raises(SpecError) as raised:
        check_request(request_from_options(tsv=text, changes=changes))
    assert message in str(raised.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"nothing\.tsv"):
        check_request(request_from_options(tsv=tmp_path / "nothing.tsv"))


@pytest.mark.parametrize(
    ("preset", "objective", "fits"),
    [
        ("transformer_tiny", Translation(), True),
        ("transformer_tiny", LanguageModelling(), False),
        ("gpt2_small", LanguageModelling(), True),
        ("gpt2_small", Translation(), False),
        ("gpt2_small", Classification(), False),
    ],
)
def test_a_model_must_suit_its_objective(preset: str, objective: Any, fits: bool) -> None:
    from regard.presets import preset as spec_of

    model = spec_of(preset)
    if fits:
        check_family(model, objective)
    else:
        with pytest.raises(SpecError, match=f"cannot learn '{objective.kind}'; choose another"):
            check_family(model, objective)
