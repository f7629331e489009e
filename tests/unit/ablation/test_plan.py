"""Rows, run hashes, tokenised text and stored results of ablations."""

import importlib
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.ablation import demo, plan, rows, single_run
from regard.ablation.experiment import LONG, Experiment, Settings
from regard.ablation.parallel import Resources, Runner
from regard.ablation.results import DONE, FAILED, Results
from regard.data.batching import Buckets, Packing
from regard.data.objectives import Classification, LanguageModelling, Objective, Translation
from regard.data.prepare import DataSpec
from regard.data.text import TSV
from regard.data.tokenizer import Characters
from regard.decoding.beam import Beam
from regard.errors import DataError, SpecError
from regard.evaluation.validation import metric_for
from regard.files import locked
from regard.models.base import ModelSpec
from regard.models.build import count
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.norm import LayerNorm
from regard.presets import PRESETS, preset
from regard.recipe.recipe import Recipe, RecipeRequest, default_train, request_from_record
from regard.runs.resolve import resolve
from regard.training.checkpoint import CheckpointPolicy, RunFolder
from regard.training.optim import AdamW, Muon
from regard.training.schedule import InverseSqrt
from regard.training.spec import TrainSpec
from regard.training.trainer import DivergedError
from regard.tree import swap, walk
from regard.variants import apply

CHANGES = (
    "model.d_model=16", "model.heads=2", "encoder.depth=1", "decoder.depth=1", "data.tokenizer=characters",
    "data.batching.tokens=200", "train.optimizer.learning_rate=1e-3", "train.schedule.warmup=4", "train.decode=4",
)  # fmt: skip


NORM = """
from dataclasses import dataclass
from regard.nn.norm import LayerNorm, Norm


@dataclass(frozen=True, slots=True)
class MyNorm(Norm):
    kind = "my_norm"
    eps: float = 1e-5

    def build(self, site):
        return LayerNorm().build(site)
"""


@pytest.fixture(autouse=True)
def float32_by_default() -> None:
    """Train in float32."""
    torch.set_default_dtype(torch.float32)


def request(folder: Path, *more: str, **tables: object) -> RecipeRequest:
    rng = random.Random(0)
    lines = [" ".join(rng.choices("abcdefgh", k=4)) for _ in range(200)]
    (folder / "text.tsv").write_text("".join(f"{line}\t{line[::-1].upper()}\n" for line in lines))
    record = {
        "model": {"preset": "transformer_tiny", "dropout": 0.0},
        "data": {"train": [{"kind": "tsv", "path": str(folder / "text.tsv")}]},
    }
    overridden = {change.partition("=")[0] for change in more}
    return request_from_record(record | tables, (*(c for c in CHANGES if c.partition("=")[0] not in overridden), *more))


def prepared(folder: Path, *more: str) -> tuple[plan.Text, Recipe]:
    result = request(folder, *more)
    text = plan.tokenised(result, folder / "data")
    recipe = resolve(result, text.data, torch.device("cpu"), lambda _: None)
    return text, replace(recipe, train=plan.training(recipe.train, 16))


def order_in(folder: Path) -> dict[str, Any]:
    """Return the `order` argument of `single_run.run` for a run in the folder `abc`."""
    text, recipe = prepared(folder)
    return {
        "folder": str(folder / "abc"),
        "recipe": recipe.record(),
        "data": str(text.folder),
        "device": "cpu",
        "trust_code": False,
        "about": {"row": "base", "seed": 1, "factor": 1.0},
        "metric": "rougeL",
    }


def test_rows_are_names_groups_or_all() -> None:
    names, named = rows.select_rows("swiglu, norm,swiglu")
    assert names[0] == "swiglu"
    assert {"rms_norm", "pre_norm"} <= set(names)
    assert len(names) == len(set(names))
    assert named == {"swiglu"}
    every, named = rows.select_rows("all")
    assert "vanilla" not in every
    assert "rotary" in every
    assert not named
    table, _ = rows.select_rows("table")
    assert table[0] == "gelu"
    assert set(table) < set(every)


@pytest.mark.parametrize(
    ("word", "message"), [("swigloo", "'swiglu'"), ("activations", "'activation'"), ("", "nothing")]
)
def test_an_unknown_row_suggests_the_nearest_name(word: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        rows.select_rows(f"gelu,{word}")


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(SpecError, match="--seeds"):
        Settings(seeds=0).check()
    with pytest.raises(SpecError, match="--steps"):
        Settings(steps=3).check()
    with pytest.raises(SpecError, match="--time"):
        Settings(steps=100, seconds=3.0).check()


def test_a_row_that_does_not_apply_is_left_out_or_refused(tmp_path: Path) -> None:
    text, recipe = prepared(tmp_path)
    builder = rows.RowBuilder(recipe, text.data, "none")
    by_group = {row.name: row for row in builder.rows(["rms_norm", "post_norm"], set())}
    assert by_group["rms_norm"].model is not None
    assert by_group["post_norm"].model is None
    assert "changes nothing" in by_group["post_norm"].left_out
    with pytest.raises(SpecError, match="'post_norm' does not apply here"):
        builder.rows(["rms_norm", "post_norm"], {"post_norm"})
    with pytest.raises(SpecError, match="no row applies"):
        builder.rows(["post_norm"], set())


def test_tables_of_two_tokenizers_cannot_be_shared(tmp_path: Path) -> None:
    text, recipe = prepared(tmp_path, "data.joint=false", "data.tokenizer={kind='bpe', vocab=262}")
    row = rows.RowBuilder(recipe, text.data, "none").rows(["gelu", "tied_inputs"], set())[1]
    assert row.left_out


def test_learned_positions_cover_the_longest_text(tmp_path: Path) -> None:
    text, recipe = prepared(tmp_path)
    model = rows.RowBuilder(recipe, text.data, "none").row("learned").model
    assert model.input.position.max_len == recipe.data.max_len + 2  # type: ignore[union-attr]


@pytest.mark.parametrize("match", ["parameters", "compute"])
def test_match_scales_the_hidden_width(tmp_path: Path, match: str) -> None:
    text, recipe = prepared(tmp_path, "model.d_model=64")
    unscaled_builder, builder = (rows.RowBuilder(recipe, text.data, which) for which in ("none", match))
    sizes: dict[str, Callable[[rows.Row], float]] = {
        "parameters": lambda row: float(row.parameters),
        "compute": lambda row: row.operations,
    }
    size, base = sizes[match], builder.base
    for name in ("swiglu", "shaw", "untied"):
        row, unscaled = builder.row(name), unscaled_builder.row(name)
        if abs(size(row) / size(base) - 1) > 0.01:
            assert "not matched" in row.note
            assert f"{size(unscaled) / size(base):.2f}" in row.note
        elif abs(size(unscaled) / size(base) - 1) > 0.01:
            assert "hidden width" in row.note
        assert row.model is None or row.parameters == count(row.model)
    if match == "parameters":
        assert "hidden width" in builder.row("untied").note


def test_scaled_widths() -> None:
    spec = demo.ablation(Path("nowhere"), "transformer_tiny", (), ()).model
    assert spec == {"preset": "transformer_tiny"}
    from regard.presets import preset

    model = rows.scaled(preset("transformer_tiny"), 0.68, 8)
    assert {part.d_hidden for part in walk(model) if isinstance(part, FeedForward)} == {176}
    assert {part.d_hidden for part in walk(rows.scaled(model, 0.0, 8)) if isinstance(part, FeedForward)} == {1}


def test_a_run_hash_depends_on_settings_and_not_on_paths(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    text, recipe = prepared(tmp_path / "a")
    other, same = prepared(tmp_path / "b")
    builder = rows.RowBuilder(recipe, text.data, "none")
    first = plan.job(builder.base, 1, recipe, text)
    assert plan.job(builder.base, 1, same, other).hash == first.hash
    hashes = {
        first.hash,
        plan.job(builder.base, 2, recipe, text).hash,
        plan.job(builder.row("swiglu"), 1, recipe, text).hash,
        plan.job(builder.base, 1, recipe, text, factor=2.0).hash,
        plan.job(builder.base, 1, replace(recipe, train=plan.training(recipe.train, 32)), text).hash,
        plan.job(builder.base, 1, recipe, replace(text, fingerprint="another")).hash,
    }
    assert len(hashes) == 6


# Hashes that earlier versions gave to the run of `stored_run`: commits 07d736d, 3180674~1 and 5d8e26d.
STORED_HASHES = {
    "transformer_tiny": ("6f87cd61ac96b6fa", "64dd6c33a117da3b", "440153b1086d0d64"),
    "bert_base": ("f26a6a0074ffac14", "0903379f65750251", "f8808d2a6d54ef5e"),
    "lstm_attention": ("4d52b55451d608cd", "4d52b55451d608cd", "42c7f9ae61571935"),
    "decoder_only": ("ff476df2f1ad5b96", "20b8433a2c7765e9", "a857001498e223ab"),
    "prefix_lm": ("5b6f945538be0d3c", "04c9094eb799b1e3", "b05526c5afe90318"),
    "alibi": ("bd0910a6ab95fb66", "99ba7d84ab3c8dc6", "151ed301920a3a09"),
}


def stored_run(model: ModelSpec) -> Recipe:
    train = plan.training(TrainSpec(steps=100, optimizer=AdamW(1e-3)), None)
    data = DataSpec((TSV("text.tsv"),), max_len=64, long="drop", batching=Buckets(200))
    return Recipe(model, data, train, Beam())


@pytest.mark.parametrize("name", STORED_HASHES)
def test_a_run_is_found_by_the_hash_of_an_earlier_version(name: str) -> None:
    model = preset(name) if name in PRESETS else apply(name, preset("transformer_tiny"))
    oldest, *later = STORED_HASHES[name]
    current, *former = plan.run_hashes(stored_run(model), "tokens")
    assert current == oldest
    assert {oldest, *later} <= {current, *former}


@pytest.mark.parametrize(
    "edits",
    [{"max_skipped": 3}, {"checkpoint_layers": True}, {"keep_state": 2}, {"parallel": "shard"}],
    ids=lambda edits: next(iter(edits)),
)
def test_another_value_of_an_added_training_setting_changes_the_hash(edits: dict[str, Any]) -> None:
    recipe = stored_run(preset("transformer_tiny"))
    changed = plan.run_hashes(replace(recipe, train=replace(recipe.train, **edits)), "tokens")
    assert not set(changed) & set(plan.run_hashes(recipe, "tokens"))


def test_another_value_of_an_added_model_setting_changes_the_hash() -> None:
    recipe = stored_run(preset("transformer_tiny"))
    tied = swap(recipe.model, SelfAttention, lambda part: replace(part, tied="query_key"))
    assert tied != recipe.model
    assert not set(plan.run_hashes(replace(recipe, model=tied), "tokens")) & set(plan.run_hashes(recipe, "tokens"))


def test_a_run_that_an_earlier_version_finished_is_not_repeated(tmp_path: Path) -> None:
    text, recipe = prepared(tmp_path)
    base = rows.RowBuilder(recipe, text.data, "none").base
    result = {"status": DONE, "scores": {"loss": 1.0, "bleu": 1.0}, "loss": 1.0, "early": {"loss": 2.0}, "curve": []}
    result |= {"steps": 16, "steps_per_second": 1.0, "device": "cpu"}
    results = Results(tmp_path)
    for job in plan.runs(base, [], 2, recipe, text, {}):
        stored_hash = job.former_hashes[-1]
        assert stored_hash != job.hash
        results.add(result | {"row": "base", "seed": job.seed, "factor": 1.0, "hash": stored_hash})
    events: list[dict[str, Any]] = []
    settings = Settings(seeds=2, steps=16)
    report = Experiment(tmp_path, settings, Resources("cpu"), events.append, text, recipe, base, []).run()
    planned = [(event["runs"], event["finished"]) for event in events if event["event"] == "plan"]
    assert planned == [(6, 6)]
    assert report.complete


def test_the_number_of_steps_that_an_earlier_version_measured_is_used(tmp_path: Path) -> None:
    text, recipe = prepared(tmp_path)
    base = rows.RowBuilder(recipe, text.data, "none").base
    probe = plan.job(base, 1, replace(recipe, train=plan.training(recipe.train, LONG)), text)
    (tmp_path / "steps.json").write_text(json.dumps({f"{probe.former_hashes[-1]} 20": 123}))
    experiment = Experiment(tmp_path, Settings(seconds=20.0), Resources("cpu"), lambda _: None, text, recipe, base, [])
    with Runner(tmp_path, Resources("cpu")) as runner:
        assert experiment._steps(runner, base, 20.0) == 123


def test_text_is_tokenised_once(tmp_path: Path) -> None:
    messages: list[str] = []
    result = request(tmp_path)
    first = plan.tokenised(result, tmp_path / "data", messages.append)
    assert messages
    messages.clear()
    assert plan.tokenised(result, tmp_path / "data", messages.append).fingerprint == first.fingerprint
    assert not messages
    (tmp_path / "text.tsv").write_text((tmp_path / "text.tsv").read_text() + "a b\tb a\n" * 20)
    assert plan.tokenised(result, tmp_path / "data", messages.append).fingerprint != first.fingerprint
    with pytest.raises(DataError, match="held_out"):
        plan.tokenised(request(tmp_path, "data.held_out=0"), tmp_path / "data")
    with pytest.raises(DataError, match="from random weights"):
        plan.tokenised(replace(request(tmp_path), start="runs/one"), tmp_path / "data")
    (tmp_path / "text.tsv").unlink()
    with pytest.raises(DataError, match="no such file"):
        plan.tokenised(result, tmp_path / "data")


def test_a_reworded_sentence_in_a_tokenizer_changes_no_hash(tmp_path: Path) -> None:
    text, recipe = prepared(tmp_path)
    base = rows.RowBuilder(recipe, text.data, "none").base
    job = plan.job(base, 1, recipe, text)
    # The text as an earlier version has stored it, beside the folder of this version.
    earlier = tmp_path / "data" / "earlier"
    shutil.copytree(text.folder, earlier)
    tokenizer = earlier / "tokenizer.source.json"
    why = text.data.tokenizers["source"].why
    assert tokenizer.read_text().count(why) == 1
    tokenizer.write_text(tokenizer.read_text().replace(why, "other words"))
    again = plan.tokenised(request(tmp_path), tmp_path / "data")
    assert again.fingerprint == text.fingerprint
    assert len(again.former_fingerprints) == 2
    assert plan.job(base, 1, recipe, again).hash == job.hash
    by_files = plan._former_fingerprint(earlier)
    assert set(plan.run_hashes(job.recipe, by_files)) < set(plan.job(base, 1, recipe, again).former_hashes)
    # Other tokens are another text.
    tokenizer.write_text(tokenizer.read_text().replace('"A":', '"AA":'))
    assert len(plan.tokenised(request(tmp_path), tmp_path / "data").former_fingerprints) == 1


def test_a_changed_tokenizer_file_gives_other_tokenised_text(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    change = f"data.tokenizer={{kind = 'imported', path = '{file}'}}"
    stores = []
    for vocabulary in (262, 270):
        text = plan.tokenised(
            request(tmp_path, f"data.tokenizer={{kind = 'bpe', vocab = {vocabulary}}}"), tmp_path / "d"
        )
        text.data.tokenizers["source"].save(file)
        stores.append(plan.tokenised(request(tmp_path, change), tmp_path / "data"))
        assert stores[-1].data.tokenizers["source"].size == text.data.tokenizers["source"].size
    assert stores[0].folder != stores[1].folder
    assert stores[0].fingerprint != stores[1].fingerprint
    file.rename(tmp_path / "elsewhere.json")
    again = plan.tokenised(request(tmp_path, change.replace("/tokenizer.json", "/elsewhere.json")), tmp_path / "data")
    assert again.folder == stores[1].folder  # the path does not matter
    with pytest.raises(DataError, match=r"data\.tokenizer\.path: cannot read .*tokenizer\.json"):
        plan.tokenised(request(tmp_path, change), tmp_path / "data")


def test_the_error_about_an_unreadable_text_contains_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> str:
        raise OSError(5, "Input/output error")

    result = request(tmp_path)
    monkeypatch.setattr(plan, "file_digest", broken)
    with pytest.raises(DataError, match=rf"^{tmp_path}/text\.tsv: cannot be read \(Input/output error\)"):
        plan.tokenised(result, tmp_path / "data")


def test_a_run_hash_depends_on_the_users_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, recipe = prepared(tmp_path)
    (tmp_path / "my_norm.py").write_text(NORM)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_norm")
    changed = replace(recipe, model=swap(recipe.model, LayerNorm, lambda _: module.MyNorm()))
    first = plan.run_hashes(changed, text.fingerprint)
    assert plan.run_hashes(changed, text.fingerprint) == first
    (tmp_path / "my_norm.py").write_text(NORM.replace("1e-5", "1e-2"))
    assert not set(plan.run_hashes(changed, text.fingerprint)) & set(first)
    monkeypatch.delitem(sys.modules, "my_norm")


# Another value of every training and data setting.
TRAINING: dict[str, Any] = {
    "steps": 7, "time": 60.0, "seed": 5, "optimizer": Muon(), "schedule": InverseSqrt(3), "accumulate": 2, "clip": 0.5,
    "precision": "float32", "ema": 0.9, "validate_every": 3, "save_every": 3, "log_every": 3, "keep": 3,
    "choose": "last", "average": 3, "criterion": "chrf", "decode": 3, "bleu_tokenize": "char", "patience": 3,
    "compile": False, "checkpoint_layers": True, "parallel": "shard", "keep_state": 3, "max_skipped": 3,
}  # fmt: skip
DATA: dict[str, Any] = {
    "train": (), "valid": (), "held_out": 3, "tokenizer": Characters(), "joint": False,
    "max_len": 9, "long": "cut", "batching": Buckets(tokens=100),
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(TrainSpec)])
def test_every_training_setting_is_used_or_refused(tmp_path: Path, name: str) -> None:
    result = request(tmp_path)
    before, after = result.train, replace(result.train, **{name: TRAINING[name]})
    assert before != after
    if name in plan.FIXED:
        with pytest.raises(SpecError, match=f"train.{name}: is not used here: every run trains for all its steps"):
            plan.check_changes([f"train.{name}=3"], result, steps=False)
        assert plan.training(replace(after, steps=160), None) == plan.training(replace(before, steps=160), None)
        message = plan.unused(replace(result, train=after))
        assert f"train.{name}" in message or TRAINING[name] == getattr(default_train(Translation()), name)
    else:
        plan.check_changes([f"train.{name}=3"], result, steps=False)
        assert getattr(plan.training(replace(after, steps=after.steps or 160), None), name) == TRAINING[name]
        assert not plan.unused(replace(result, train=after))


@pytest.mark.parametrize("name", DATA)
def test_every_data_setting_changes_the_run_hash(tmp_path: Path, name: str) -> None:
    text, recipe = prepared(tmp_path, "data.tokenizer=words")
    result = request(tmp_path, "data.tokenizer=words")
    (tmp_path / "more.tsv").write_text("a b\tb a\n" * 20)
    value = DATA[name]
    if name in ("train", "valid"):
        value = (*getattr(result.data, name), TSV(str(tmp_path / "more.tsv")))
    changed = replace(result, data=replace(result.data, **{name: value}))
    assert {*DATA, "objective"} == {field.name for field in fields(DataSpec)}  # the objective is that of the files
    plan.check_changes([f"data.{name}=3"], changed, steps=False)
    new_text = plan.tokenised(changed, tmp_path / "data")
    new_recipe = resolve(changed, new_text.data, torch.device("cpu"), lambda _: None)
    new_recipe = replace(new_recipe, train=recipe.train)
    hashes = plan.run_hashes(new_recipe, new_text.fingerprint)
    assert not set(hashes) & set(plan.run_hashes(recipe, text.fingerprint))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("decode.beam_size=4", "greedy"),
        ("decode={kind = 'sample'}", "greedy"),
        ("train.steps=5", "another option"),
        ("train.seed=5", "--seeds"),
    ],
)
def test_changes_without_effect_are_refused(tmp_path: Path, change: str, message: str) -> None:
    result = request(tmp_path)
    held_out = replace(result, data=replace(result.data, valid=result.data.train))
    with pytest.raises(SpecError, match=message):
        plan.check_changes([change], held_out, steps=True)
    plan.check_changes(["model.d_model=16", "d_model=16", "train.decode=3"], held_out, steps=True)


def test_unused_settings_of_a_recipe_are_reported(tmp_path: Path) -> None:
    assert plan.unused(request(tmp_path)) == ""
    message = plan.unused(
        request(tmp_path, "train.patience=7", "train.average=9", "train.keep=9", "decode.beam_size=3")
    )
    assert message.startswith("not used from the recipe: train.keep, train.average, train.patience, decode; every run")


def test_the_base_has_three_times_the_seeds(tmp_path: Path) -> None:
    text, recipe = prepared(tmp_path)
    builder = rows.RowBuilder(recipe, text.data, "none")
    jobs = plan.runs(builder.base, [builder.row("gelu")], 2, recipe, text, {"gelu": 2.0})
    assert [(job.row, job.seed) for job in jobs] == [*(("base", s) for s in range(1, 7)), ("gelu", 1), ("gelu", 2)]
    assert [job.recipe.train.seed for job in jobs[-2:]] == [1, 2]
    rates = [job.recipe.train.optimizer.learning_rate for job in jobs if job.recipe.train.optimizer is not None]
    assert (rates[0], rates[-1]) == (1e-3, 2e-3)
    searches = plan.searches([builder.base], recipe, text)
    assert [job.factor for job in searches] == [0.5, 1.0, 2.0]
    assert {job.seed for job in searches} == {plan.SEARCH_SEED}


def test_training_has_fixed_validations_and_no_early_stopping() -> None:
    spec = plan.training(TrainSpec(steps=400, schedule=InverseSqrt(100), patience=5, average=5), None)
    assert (spec.validate_every, plan.early_step(spec)) == (25, 50)
    assert (spec.patience, spec.average, spec.schedule) == (0, 1, InverseSqrt(100))
    short = plan.training(TrainSpec(steps=400, schedule=InverseSqrt(100)), 40)
    assert short.schedule == InverseSqrt(10)
    assert plan.early_step(plan.training(TrainSpec(steps=8), None)) == 1
    odd = plan.training(TrainSpec(steps=1003), None)
    assert plan.early_step(odd) % (odd.validate_every or 0) == 0


def test_scaling_changes_both_learning_rates_of_muon() -> None:
    result = Muon(learning_rate=0.1, rest=AdamW(learning_rate=0.2)).scaled(0.5)
    assert (result.learning_rate, result.rest.learning_rate) == (0.05, 0.1)


def test_a_resumed_run_gives_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_run, "RARE", CheckpointPolicy(final=False))
    order = order_in(tmp_path)
    whole = single_run.run(order, lambda _: None)
    assert whole["status"] == DONE
    assert whole["hash"] == "abc"
    assert [step for step, _ in whole["curve"]] == list(range(1, 17))
    assert whole["early"]["step"] == 2
    assert {"bleu", "rouge1", "rouge2", "rougeL"} <= whole["scores"].keys()
    assert json.loads((tmp_path / "abc" / "result.json").read_text())["loss"] == whole["loss"]
    assert not list((tmp_path / "abc").glob("*.safetensors"))

    def stop(event: dict) -> None:
        if event["step"] == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        single_run.run(order | {"folder": str(tmp_path / "cut")}, stop)
    latest = RunFolder(tmp_path / "cut").latest()
    assert latest is not None
    assert latest.step == 8
    again = single_run.run(order | {"folder": str(tmp_path / "cut")}, lambda _: None)
    assert again["curve"] == whole["curve"]
    assert again["loss"] == whole["loss"]
    timed = single_run.run(order | {"folder": str(tmp_path / "fast"), "seconds": 0.05}, lambda _: None)
    assert timed["steps_per_second"] > 0


def stopped_at_step_9(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], RunFolder]:
    """Return the order and the folder of a run that was killed after the checkpoint of step 8."""
    monkeypatch.setattr(single_run, "RARE", CheckpointPolicy(final=False))
    order = order_in(folder)

    def stop(event: dict) -> None:
        if event["step"] == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        single_run.run(order, stop)
    run = RunFolder(order["folder"])
    assert run.checkpoints() == [8]
    return order, run


@pytest.mark.parametrize("name", ["weights", "trainer", "state"])
def test_a_run_whose_only_checkpoint_is_damaged_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    order, run = stopped_at_step_9(tmp_path, monkeypatch)
    paths = {"weights": run.weights(8), "trainer": run.trainer(8, "safetensors"), "state": run.trainer(8, "json")}
    paths[name].write_bytes(paths[name].read_bytes()[:-5])
    (run.path / "job.json").write_text("{}")
    events: list[dict[str, Any]] = []
    result = single_run.run(order, events.append)
    assert result["status"] == DONE
    assert [step for step, _ in result["curve"]] == list(range(1, 17))
    (message,) = [event["text"] for event in events if event["event"] == "message"]
    assert message.startswith(str(paths[name]))
    assert message.endswith("; this training run starts again from step 0")
    assert (run.path / "job.json").exists()


def test_a_checkpoint_of_a_newer_version_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, run = stopped_at_step_9(tmp_path, monkeypatch)
    state = json.loads(run.trainer(8, "json").read_text())
    run.trainer(8, "json").write_text(json.dumps(state | {"format": state["format"] + 1}))
    result = single_run.run(order, lambda _: None)
    assert result["status"] == FAILED
    assert "upgrade regard" in result["error"]
    assert run.weights(8).exists()


def test_failed_and_diverged_runs_have_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_in(tmp_path)
    result_file = tmp_path / "abc" / "result.json"

    def diverge(*_: object) -> None:
        raise DivergedError("the loss is nan at step 3")

    def fail(*_: object) -> None:
        raise RuntimeError("something\nlong")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    for broken, status, error in (
        (diverge, "diverged", "the loss is nan at step 3"),
        (fail, "failed", "RuntimeError: something"),
        (full, "failed", "out of memory"),
    ):
        monkeypatch.setattr(single_run, "train", broken)
        result = single_run.run(order, lambda _: None)
        assert (result["status"], result["error"]) == (status, error)
        assert result_file.exists() == (status == "diverged"), "training that fails is repeated"
        result_file.unlink(missing_ok=True)
    assert Results(tmp_path).by_hash == {}


def test_a_worker_reports_that_it_waits_for_a_locked_folder(tmp_path: Path) -> None:
    order = order_in(tmp_path)

    def watch(event: dict[str, Any]) -> None:
        assert event["event"] == "message"
        assert f"{tmp_path / 'abc'} is in use by another process" in event["text"]
        raise KeyboardInterrupt

    with locked(tmp_path / "abc"), pytest.raises(KeyboardInterrupt):
        single_run.run(order, watch)


def test_results_are_read_from_the_list_and_the_run_folders(tmp_path: Path) -> None:
    scores = {"scores": {"loss": 1.0}, "loss": 1.0, "early": {"loss": 2.0}, "curve": [], "steps": 5}
    scores |= {"steps_per_second": 1.0, "device": "cpu"}
    done, failed = {"hash": "1", "status": DONE, **scores}, {"hash": "2", "status": FAILED, "error": "no"}
    results = Results(tmp_path)
    results.add(done)
    results.add(failed)
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('nonsense\n{"hash": "9"}\n{"hash": "3", "sta')  # invalid lines, and a line that was cut off
    (tmp_path / "runs" / "4").mkdir(parents=True)
    (tmp_path / "runs" / "4" / "result.json").write_text(json.dumps({"hash": "4", "status": DONE, **scores}))
    again = Results(tmp_path)
    assert [again.finished(name) for name in "1234"] == [True, False, False, True]
    again.add({"hash": "2", "status": DONE, **scores})
    last = Results(tmp_path)
    assert last.get("2") == {"hash": "2", "status": DONE, **scores}
    assert not Results(tmp_path, "rougeL").finished("2")  # it was not measured with this metric
    assert last.get("9") is None
    assert (tmp_path / "results.jsonl").read_text().endswith("\n")


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"])
def test_a_result_with_any_line_separator_in_its_text_is_read_back(tmp_path: Path, end: str) -> None:
    done: dict[str, Any] = dict.fromkeys(("loss", "early", "curve", "steps", "steps_per_second", "device"), 1)
    result = done | {"hash": "1", "status": DONE, "scores": {"loss": 1.0}, "said": [f"one{end}two"]}
    Results(tmp_path, texts=True).add(result)
    again = Results(tmp_path, texts=True)
    assert again.get("1") == result
    assert again.finished("1")


def test_invalid_lines_of_the_results_are_ignored(tmp_path: Path) -> None:
    failed = b'{"hash": "1", "status": "failed", "error": "no"}\n'
    odd = [b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"hash": "2", "status": "done"}\n', b"5\n", b"\n", b'{"hash": 3}\n']
    (tmp_path / "results.jsonl").write_bytes(b"".join([*odd, failed, b'{"hash": "cut \xe2\x80']))
    assert list(Results(tmp_path).by_hash) == ["1"]
    assert (tmp_path / "results.jsonl").read_bytes() == b"".join([*odd, failed])


@pytest.mark.parametrize(
    ("objective", "name", "decode", "metric"),
    [
        (Translation(), None, 5, "bleu"),
        (Translation(), "rouge1", 5, "rouge1"),
        (Translation(), None, 0, "perplexity"),
        (Classification(), None, 0, "accuracy"),
        (LanguageModelling(), "bits_per_byte", 0, "bits_per_byte"),
    ],
)
def test_the_default_metric_depends_on_the_task(
    objective: Objective, name: str | None, decode: int, metric: str
) -> None:
    assert metric_for(objective, name, decode).name == metric


def test_a_metric_that_the_task_lacks_is_refused() -> None:
    with pytest.raises(
        SpecError, match="--metric: 'bleu' is not available for this task; known names: 'accuracy', 'matthews'"
    ):
        metric_for(Classification(), "bleu", 5)


def test_a_gpu_gets_packed_rows_by_default(tmp_path: Path) -> None:
    """Only the choice of batching is tested, which needs no GPU."""
    cuda, messages = torch.device("cuda"), []
    text, _ = prepared(tmp_path)
    default = request(tmp_path)
    default = replace(default, data=replace(default.data, batching=None))
    batching = resolve(default, text.data, cuda, messages.append).data.batching
    longest = max(int(text.data.train[0][n].lengths.max()) - (n == "target") for n in ("source", "target"))
    assert isinstance(batching, Packing)
    assert batching.length == max(128, -(-longest // 8) * 8)
    assert any(f"packed into rows of {batching.length}" in sentence for sentence in messages)
    assert isinstance(resolve(default, text.data, cuda, messages.append, packs=False).data.batching, Buckets)
    assert isinstance(resolve(default, text.data, torch.device("cpu"), messages.append).data.batching, Buckets)
    assert resolve(request(tmp_path), text.data, cuda, messages.append).data.batching == Packing(200, batching.length)
    for more in ("data.batching.tokens=50", "data.batching=buckets"):  # too few tokens; padding requested
        small = request(tmp_path, more)
        assert isinstance(resolve(small, text.data, cuda, messages.append).data.batching, Buckets)
