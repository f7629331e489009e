"""Recipes: read, edited by path, resolved, written and read again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.data.batching import Buckets, Packing, Windows
from regard.data.objectives import Classification, LanguageModelling, Translation
from regard.data.prepare import DataSpec
from regard.data.text import JSONL, TSV, Labelled, Lines, ParallelFiles
from regard.data.tokenizer import BPE, Characters, Imported, Words
from regard.decoding.beam import Beam
from regard.decoding.sample import Sample
from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.planner.fit import fitted
from regard.presets import PRESETS, preset
from regard.recipe.recipe import (
    MODEL_PARTS,
    PARTS,
    SLOTS,
    Recipe,
    RecipeRequest,
    load_model,
    model_for,
    model_of,
    parse_change,
    read_file,
    request_from_record,
)
from regard.training.optim import Adafactor, AdamW
from regard.training.schedule import Cosine
from regard.training.spec import TrainSpec
from regard.tree import to_record
from regard.variants import apply

DATA: dict[str, Any] = {"train": [{"kind": "tsv", "path": "a.tsv"}]}


def nothing(_: ModelSpec) -> dict[str, Any]:
    return {}


def recipe() -> Recipe:
    data = DataSpec(
        train=(TSV("/a.tsv", weight=2.0), ParallelFiles("/a", "/b"), JSONL("/c.jsonl", "x", "y")),
        valid=(TSV("/v.tsv"),),
        tokenizer=BPE(8000),
        batching=Packing(4096, 256),
    )
    train = TrainSpec(steps=10, optimizer=Adafactor(learning_rate=0.1), schedule=Cosine(5, 0.2), patience=0, average=3)
    return Recipe(apply("swiglu", preset("transformer_tiny", vocab=99)), data, train, Beam(beam_size=3, alpha=0.5))


def test_a_recipe_round_trips_through_json() -> None:
    assert Recipe.of(json.loads(json.dumps(recipe().record()))) == recipe()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_recipe_of_every_preset_round_trips_through_json(name: str) -> None:
    original = replace(recipe(), model=preset(name))
    assert Recipe.of(json.loads(json.dumps(original.record()))) == original


@pytest.mark.parametrize(
    "data",
    [
        DataSpec((Lines("/l"),), objective=LanguageModelling(), tokenizer=Characters(), batching=Windows(512, 64)),
        DataSpec((Lines("/l"),), objective=LanguageModelling("lines"), tokenizer=Imported("/t.json")),
        DataSpec((Labelled("/l"),), objective=Classification(("a", "b")), tokenizer=Words(100)),
    ],
)
def test_every_kind_of_data_round_trips_through_json(data: DataSpec) -> None:
    original = Recipe(preset("transformer_tiny"), data, TrainSpec(), Sample())
    assert Recipe.of(json.loads(json.dumps(original.record()))) == original


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("train", "stesp"), 3, "train.stesp: unknown key 'stesp' in 'train'; did you mean 'steps'?"),
        (("dta",), {}, "dta: unknown key 'dta' in 'recipe'; did you mean 'data'?"),
        (("train", "steps"), "many", "train.steps: needs a whole number"),
        (("decode", "kind"), "beem", "decode.kind: unknown kind 'beem'; did you mean 'beam'?"),
        (("train", "optimizer", "kind"), "my:Code", "add --trust-code if you trust it"),
    ],
)
def test_a_wrong_recipe_is_refused_where_it_is_wrong(path: tuple[str, ...], value: Any, message: str) -> None:
    record = recipe().record()
    inner = record
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(SpecError) as raised:
        Recipe.of(record)
    assert message in str(raised.value)


# -- requests


def test_a_short_recipe_is_filled_with_defaults() -> None:
    request = request_from_record({"data": DATA})
    assert request == RecipeRequest(data=DataSpec(train=(TSV("a.tsv"),)), train=TrainSpec(), decode=Beam())


def test_edits_reach_all_sections() -> None:
    request = request_from_record(
        {"data": DATA, "model": {"preset": "transformer_tiny"}, "train": {"steps": 5}, "decode": {"beam_size": 2}},
        [
            *(
                "train.steps=7",
                "train.optimizer.learning_rate=0.5",
                "train.schedule=cosine",
                "train.schedule.floor=0.25",
            ),
            *("data.max_len=9", "data.tokenizer=words", "data.batching.tokens=77", "data.train[0].weight=3"),
            *("decode.beam_size=4", "decode.alpha=0.5", "model.decoder.depth=3", "encoder.depth=2", "dropout=0.25"),
        ],
        variants=["rotary"],
    )
    assert request.train == TrainSpec(steps=7, optimizer=AdamW(learning_rate=0.5), schedule=Cosine(floor=0.25))
    assert request.data == DataSpec((TSV("a.tsv", weight=3.0),), tokenizer=Words(), max_len=9, batching=Buckets(77))
    assert request.decode == Beam(beam_size=4, alpha=0.5)
    assert request.changes == {"decoder.depth": 3, "encoder.depth": 2, "dropout": 0.25}
    assert (request.model, request.variants) == ({"preset": "transformer_tiny"}, ("rotary",))


def test_a_model_table_without_a_preset_edits_the_model_that_is_chosen() -> None:
    table = {"dropout": 0.5, "heads": 8, "decoder": {"depth": 3}, "variants": ["rotary"]}
    request = request_from_record({"data": DATA, "model": table}, ["model.heads=2"], ["swiglu"])
    assert (request.model, request.variants) == (None, ("rotary", "swiglu"))
    assert request.changes == {"dropout": 0.5, "heads": 2, "decoder.depth": 3}
    with pytest.raises(SpecError, match=r"model\.variants: needs a list of names, not 'swiglu'"):
        request_from_record({"data": DATA, "model": {"variants": "swiglu"}})


@pytest.mark.parametrize(
    "changes", [("train.steps=7", "train.steps=8"), ("model.heads=2", "heads=2"), ("heads=2", "model.heads=4")]
)
def test_one_path_set_twice_is_refused(changes: tuple[str, str]) -> None:
    with pytest.raises(SpecError, match="is set twice; leave one of the two out"):
        request_from_record({"data": DATA}, changes)


def test_one_place_by_two_paths_is_refused() -> None:
    with pytest.raises(SpecError, match=r"is set twice"):
        load_model("transformer_tiny", ["encoder.pattern[0].residual=pre_norm", "encoder.pattern[-1].residual=rezero"])
    with pytest.raises(SpecError, match="heads is set twice"):
        load_model("transformer_tiny", ["heads=2", "model.heads=4"])


def test_one_variant_twice_is_refused() -> None:
    with pytest.raises(SpecError, match="'rotary' is given twice"):
        request_from_record(
            {"data": DATA, "model": {"preset": "transformer_tiny", "variants": ["rotary"]}}, (), ["rotary"]
        )


@pytest.mark.parametrize("change", ["data.tokenizer=bytes", "data.tokenizer.vocab=300", "data.joint=false"])
def test_fine_tuning_refuses_another_tokenizer(change: str) -> None:
    with pytest.raises(SpecError, match="--from uses the tokenizer of runs/one unchanged"):
        request_from_record({"data": DATA, "start": "runs/one"}, [change])
    with pytest.raises(SpecError, match="--from uses the tokenizer of runs/one unchanged"):
        request_from_record({"data": DATA | {"tokenizer": "bytes"}, "start": "runs/one"})


def test_a_value_cannot_set_a_second_key() -> None:
    with pytest.raises(SpecError, match="needs a whole number"):
        request_from_record({"data": DATA}, ["train.steps=3\ntrain.seed=4"])


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [102, 500, 100_000])
def test_deep_nesting_is_refused(levels: int, tmp_path: Path) -> None:
    for name, text in (("a.toml", f"data = {nested(levels)}"), ("b.json", f'{{"data": {nested(levels)}}}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(SpecError, match="nested more than 100 levels"):
            read_file(tmp_path / name)
    with pytest.raises(SpecError, match=r"train.steps.*nested more than 100 levels"):
        request_from_record({"data": DATA}, [f"train.steps={nested(levels)}"])


def test_a_key_twice_in_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"train": {"steps": 3, "steps": 4}}')
    with pytest.raises(SpecError, match="the key 'steps' is repeated"):
        read_file(tmp_path / "a.json")


def test_a_part_and_its_fields_can_be_set_together() -> None:
    request = request_from_record(
        {"data": DATA}, ["data.batching=packing", "data.batching.length=64", "data.batching.tokens=640"]
    )
    assert request.data.batching == Packing(640, 64)


@pytest.mark.parametrize(
    ("kind", "objective", "batching"),
    [("tsv", "translation", Buckets(77)), ("lines", "language_model", Windows(77, 50))],
)
def test_batching_can_be_edited_before_it_is_chosen(kind: str, objective: str, batching: Any) -> None:
    data = {"train": [{"kind": kind, "path": "a"}], "objective": objective}
    edits = ["data.batching.tokens=77"] + ["data.batching.length=50"] * (kind == "lines")
    assert request_from_record({"data": data}, edits).data.batching == batching


@pytest.mark.parametrize(
    ("batching", "edits", "fixes"),
    [
        (None, [], False),
        (None, ["data.batching.tokens=77"], False),
        (None, ["data.batching=buckets"], True),
        (None, ["data.batching=packing", "data.batching.length=64", "data.batching.tokens=640"], True),
        ({"kind": "buckets", "tokens": 77}, [], True),
        ({"kind": "buckets"}, ["data.batching.tokens=77"], True),
    ],
)
def test_tokens_per_batch_alone_do_not_fix_the_rows(batching: Any, edits: list[str], fixes: bool) -> None:
    request = request_from_record({"data": DATA | ({} if batching is None else {"batching": batching})}, edits)
    assert request.fixes_rows == fixes
    assert RecipeRequest.of(request.record()) == request


def test_the_decode_section_may_select_another_search() -> None:
    assert request_from_record({"data": DATA, "decode": "sample"}).decode == Sample()
    assert request_from_record({"data": DATA, "decode": {"kind": "sample", "temperature": 0.5}}).decode == Sample(
        temperature=0.5
    )


TINY = {"preset": "transformer_tiny"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"dta": {}}, "dta: unknown key 'dta' in a recipe; did you mean 'data'?"),
        ({"data": DATA | {"max_lenn": 3}}, "data.max_lenn: unknown key 'max_lenn' in 'data'; did you mean 'max_len'?"),
        ({"train": {"stesp": 3}}, "train.stesp: unknown key 'stesp' in 'train'; did you mean 'steps'?"),
        ({"decode": {"beems": 3}}, "decode.beems: unknown key 'beems' in 'beam'; did you mean 'beam_size'?"),
        ({"train": 3}, "train: needs a table"),
        ({"model": 3}, "model: needs a table with a kind or a preset, not 3"),
        ({"model": {"preset": 3}}, "model.preset: needs the name of a preset, not 3"),
        ({"model": {"preset": "transformer_tine"}}, "model: unknown preset 'transformer_tine'; did you mean"),
        ({"model": TINY | {"heds": 2}}, "model.heds: unknown key 'heds' in 'encoder_decoder'; did you mean 'heads'?"),
        ({"model": TINY | {"variants": "swiglu"}}, "model.variants: needs a list of names, not 'swiglu'"),
        (
            {"model": TINY | {"variants": ["swigul"]}},
            "model.variants: unknown variant 'swigul'; did you mean 'swiglu'?",
        ),
        ({"model": TINY | {"vocab": 9}}, "model.vocab: is the size of the tokenizer; set data.tokenizer.vocab"),
    ],
)
def test_a_wrong_table_is_refused_at_once(record: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        request_from_record({"data": DATA} | record)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.stesp=3", "train.stesp: unknown key 'stesp' in 'train'; did you mean 'steps'?"),
        (
            "train.checkpoint_layer=true",
            "train.checkpoint_layer: unknown key 'checkpoint_layer' in 'train'; did you mean 'checkpoint_layers'?",
        ),
        ("data.tokenizer.vocabb=3", "data.tokenizer.vocabb: unknown key 'vocabb' in 'bpe'; did you mean 'vocab'?"),
        ("decode.beems=3", "decode.beems: unknown key 'beems' in 'beam'; did you mean 'beam_size'?"),
        ("model.heds=2", "model.heds: unknown key 'heds' in 'encoder_decoder'; did you mean 'heads'?"),
        ("heds=2", "model.heds: unknown key 'heds' in 'encoder_decoder'; did you mean 'heads'?"),
        ("train.steps=many", "train.steps: needs"),
        ("train.steps=0", "train.steps: must be at least 1, not 0"),
        ("data.train[1].weight=2", "data.train[1]: there are only 1 entries"),
        ("train=3", "train: is a whole section; set a field of it"),
        ("decode=sample", "decode: is a whole section; set a field of it"),
        ("train.steps", "--set: 'train.steps' is not path=value"),
        ("model.vocab=9", "model.vocab: is the size of the tokenizer"),
        ("target_vocab=9", "model.target_vocab: is the size of the tokenizer"),
    ],
)
def test_a_wrong_edit_is_refused_at_once(change: str, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        request_from_record({"data": DATA, "model": TINY}, [change])
    assert message in str(raised.value)


def test_a_recipe_without_data_is_refused() -> None:
    with pytest.raises(SpecError, match="data: is missing; a recipe needs the text to learn from"):
        request_from_record({"train": {}})


def request_with_everything() -> RecipeRequest:
    request = request_from_record(
        {
            "data": DATA | {"valid": [{"kind": "tsv", "path": "v.tsv"}]},
            "model": {"preset": "transformer_tiny", "decoder": {"depth": 2}, "variants": ["rotary"]},
        },
        ["model.heads=2", "train.steps=7", "decode.beam_size=1"],
        ["swiglu"],
    )
    return replace(request, start="runs/one")


def test_a_request_round_trips_through_json() -> None:
    request = request_with_everything()
    assert RecipeRequest.of(json.loads(json.dumps(request.record()))) == request


def test_code_in_a_request_needs_trust() -> None:
    record = {"kind": "regard.training.optim:AdamW", "rate": 0.5}
    data = {"data": DATA, "train": {"optimizer": record}}
    with pytest.raises(SpecError, match="add --trust-code"):
        request_from_record(data)
    request = request_from_record(data, trust_code=True)
    assert request.train.optimizer == AdamW(learning_rate=0.5)
    written = request.record() | {"train": request.record()["train"] | {"optimizer": record}}
    assert RecipeRequest.of(written, trust_code=True) == request
    with pytest.raises(SpecError, match="add --trust-code"):  # a stored request cannot set trust_code
        RecipeRequest.of(written | {"trust_code": True})


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = request_with_everything()
    absolute = replace(request, data=replace(request.data, tokenizer=Imported("t.json"))).absolute()
    folder = str(tmp_path)
    assert absolute.data.train == (TSV(f"{folder}/a.tsv"),)
    assert absolute.data.valid == (TSV(f"{folder}/v.tsv"),)
    assert absolute.data.tokenizer == Imported(f"{folder}/t.json")
    assert absolute.start == f"{folder}/runs/one"
    assert absolute.absolute() == absolute
    assert request_from_record({"data": DATA}).absolute().start is None


# -- the model


def test_sizes_come_before_variants_and_other_edits_after() -> None:
    table = {"preset": "transformer_small", "variants": ["swiglu"], "d_model": 512, "decoder": {"depth": 2}}
    base, spec = model_of(table, "model")
    assert base == preset("transformer_small")
    expected = apply("swiglu", preset("transformer_small", d_model=512))
    model: Any = spec
    assert (model.d_model, model.decoder.depth) == (512, 2)
    assert model.encoder == expected.encoder  # type: ignore[attr-defined]  # two thirds of 4 x 512


def test_training_and_show_use_the_same_model(tmp_path: Path) -> None:
    """The order of variants and edits matters, and must be the same wherever the table is read."""
    path = tmp_path / "recipe.toml"
    path.write_text(
        '[model]\npreset = "transformer_small"\nd_model = 512\nvariants = ["swiglu", "pre_norm"]\n'
        '[model.encoder]\ndepth = 2\n[data]\ntrain = [{kind = "tsv", path = "a.tsv"}]\n'
    )
    loaded = load_model(str(path), ["model.heads=2"])[1]
    trained = model_for(request_from_record(read_file(path), ["model.heads=2"]), None, nothing)[1]
    assert trained == loaded


def test_a_complete_record_may_have_variants_too() -> None:
    record = {"kind": "decoder_only", "d_model": 64, "variants": ["rms_norm"]}
    base, spec = model_of(record, "model")
    assert (base.d_model, spec) == (64, apply("rms_norm", base))


def test_a_name_alone_is_a_preset_or_a_kind() -> None:
    assert model_of("transformer_tiny", "model")[1] == preset("transformer_tiny")
    assert type(model_of("decoder_only", "model")[1]).kind == "decoder_only"
    assert request_from_record({"data": DATA, "model": "transformer_tiny"}).model == {"preset": "transformer_tiny"}


def test_the_requested_model_is_fitted_to_the_data() -> None:
    request = request_with_everything()
    base, spec = model_for(request, None, lambda _: {"vocab": 77})
    assert base == preset("transformer_tiny")
    with_table: Any = apply("rotary", preset("transformer_tiny"))
    assert spec.input == with_table.input
    model: Any = spec
    assert (model.vocab, model.heads, model.decoder.depth, model.encoder.depth) == (77, 2, 2, 4)
    assert model.encoder.pattern[0].branches[1].gated


def test_a_chosen_model_is_edited_and_fitted_to_the_data() -> None:
    request = request_from_record({"data": DATA}, ["model.heads=2"], ["rotary"])
    fitted_specs: list[ModelSpec] = []

    def fitted(spec: ModelSpec) -> dict[str, Any]:
        fitted_specs.append(spec)
        return {"vocab": 77}

    base, spec = model_for(request, preset("transformer_small"), fitted)
    assert base == preset("transformer_small")
    assert spec == preset_with(heads=2, vocab=77)
    assert fitted_specs == [
        preset("transformer_small", heads=2),
        preset_with(heads=2, vocab=77),
    ]  # before the variant, after it


def preset_with(**changes: Any) -> ModelSpec:
    return replace(apply("rotary", preset("transformer_small")), **changes)  # type: ignore[type-var]


@pytest.mark.parametrize("where", ["table", "changes"])
def test_an_edit_that_the_data_contradict_is_refused(where: str) -> None:
    """The edit is not overwritten silently."""

    def request_with(value: int) -> RecipeRequest:
        table: dict[str, Any] = {"preset": "gpt2_small"}
        if where == "table":
            table["input"] = {"position": {"max_len": value}}
        edits = [f"model.input.position.max_len={value}"] if where == "changes" else []
        return request_from_record({"data": DATA, "model": table}, edits)

    fits: Callable[[ModelSpec], dict[str, Any]] = lambda _: {"input.position.max_len": 258}  # noqa: E731
    with pytest.raises(SpecError, match=r"model\.input\.position\.max_len: is 64 here, but the data need 258"):
        model_for(request_with(64), None, fits)
    model: Any = model_for(request_with(258), None, fits)[1]
    assert model.input.position.max_len == 258


def test_a_vocabulary_is_never_set() -> None:
    for changes in ({"vocab": 9}, {"target_vocab": 9}):
        request = replace(request_from_record({"data": DATA}), changes=changes)
        with pytest.raises(SpecError, match=r"is the size of the tokenizer; set data\.tokenizer\.vocab to choose it"):
            model_for(request, preset("transformer_tiny"), nothing)


# -- edits and files


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("a.b=3", "a.b", 3),
        (" a = 3.5 ", "a", 3.5),
        ("a=1e-3", "a", 1e-3),
        ("a=true", "a", True),
        ("a=none", "a", None),
        ("a=null", "a", None),
        ("a=[1, 2]", "a", [1, 2]),
        ('a={ kind = "x" }', "a", {"kind": "x"}),
        ("a=rotary", "a", "rotary"),
        ('a="3"', "a", "3"),
        ("a=b=c", "a", "b=c"),
        ("a=/some/path.txt", "a", "/some/path.txt"),
    ],
)
def test_changes_are_parsed(text: str, path: str, value: Any) -> None:
    assert parse_change(text) == (path, value)


@pytest.mark.parametrize("text", ["", "a", "a=", "=3", " = "])
def test_invalid_edits_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is not path=value"):
        parse_change(text)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "a = ", "is not valid TOML"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[]", "must hold a table, not a list"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SpecError, match=message):
        read_file(tmp_path / name)
    with pytest.raises(SpecError, match="cannot read"):
        read_file(tmp_path / "nowhere.toml")


def test_kinds_are_all_different() -> None:
    assert all(part.kind == kind for kind, part in PARTS.items())
    assert len(PARTS) == len(MODEL_PARTS) + sum(len(parts) for parts in SLOTS.values())
    assert {"adamw", "beam", "bpe", "encoder_decoder", "tsv", "translation", "cosine"} <= PARTS.keys()


def test_sizes_from_the_command_line_come_before_the_variants_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\npreset = "narang_small"\nvariants = ["factorised"]\n[data]\n')
    loaded: Any = load_model(str(path), ["model.d_model=384"])[1]
    assert loaded.table.width == 64
    request = request_from_record(
        {"data": DATA, "model": {"preset": "narang_small", "variants": ["factorised"]}}, ["model.d_model=384"]
    )
    trained: Any = model_for(request, None, nothing)[1]
    assert trained.table.width == 64


def test_depth_comes_before_variants() -> None:
    table = {"preset": "narang_small", "variants": ["product_key_memory"], "decoder": {"depth": 4}}
    model: Any = model_of(table, "model")[1]
    layers = [n for n in range(4) if "product_key_memory" in str(to_record(model.decoder.block_of(n), PARTS))]
    assert layers == [2]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tied_inputs", "model.sharing.source_target: a variant makes it True, but the data need False"),
        ("tied_decoder", "'tied_decoder' changes nothing here"),
        ("decoder_only", "one vocabulary"),
    ],
)
def test_variants_that_do_not_fit_two_tokenizers_are_refused(name: str, sentence: str) -> None:
    request = request_from_record({"data": DATA, "model": "transformer_small"}, (), [name])

    def fits(spec: ModelSpec) -> dict[str, Any]:
        return fitted(spec, Translation(), {"source": 90, "target": 80}, 20, joint=False)

    with pytest.raises(SpecError, match=sentence):
        model_for(request, None, fits)


def test_a_synthesizer_scores_as_many_positions_as_the_text_needs() -> None:
    request = request_from_record({"data": DATA, "model": "narang_small"}, (), ["synth_random"])
    model: Any = model_for(request, None, lambda m: fitted(m, Translation(), {"source": 90, "target": 90}, 1026))[1]
    assert model.encoder.pattern[0].branches[0].max_len == 1026
