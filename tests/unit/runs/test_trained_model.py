"""`TrainedModel` and the top-level functions: options, results and errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.data.objectives import Translation
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.sample import Sample
from regard.errors import DataError, SpecError
from regard.inference.text import Constraints, Output
from regard.runs.inspect import Attention
from tests.unit.decoding.untrained import LINES, STREAM, TWO, untrained


@pytest.fixture(autouse=True)
def single() -> Iterator[None]:
    """Runs hold float32 weights; the other unit tests compute in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "translator": untrained(folder / "translator", Translation()),
        "other": untrained(folder / "other", Translation(), Beam(3, 2)),
        "stream": untrained(folder / "stream", STREAM, Sample()),
        "lines": untrained(folder / "lines", LINES, Sample()),
        "classifier": untrained(folder / "classifier", TWO),
    }


@pytest.fixture(scope="module")
def runs(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: regard.load(path, "cpu") for name, path in folders.items()}


def test_repr_is_one_screen_of_facts(runs: dict[str, Any]) -> None:
    text = repr(runs["translator"])
    assert text.count("\n") < 24
    assert max(map(len, text.splitlines())) < 160
    for word in ("translator", "translate", "encoder_decoder", "272 subwords", "parameters", "step", "finished"):
        assert word in text


@pytest.mark.parametrize("name", ["translator", "stream", "lines", "classifier"])
def test_command_matches_the_task(runs: dict[str, Any], name: str) -> None:
    expected = {"translator": "translate", "classifier": "classify"}.get(name, "generate")
    assert runs[name].command == expected


def test_translate_by_folder_by_model_and_by_method_agree(folders: dict[str, Path], runs: dict[str, Any]) -> None:
    options: dict[str, Any] = {"beam": 2, "max_len": 6}
    by_method = runs["translator"].translate(["abcd", "efgh ijkl"], **options)
    assert regard.translate(folders["translator"], ["abcd", "efgh ijkl"], device="cpu", **options) == by_method
    assert regard.translate(runs["translator"], ["abcd", "efgh ijkl"], **options) == by_method
    assert regard.translate(runs["translator"], "abcd", **options) == by_method[0]


def test_n_best_returns_a_list_of_each_text(runs: dict[str, Any]) -> None:
    translations = runs["translator"].translate("abcd", n_best=3, max_len=5)
    assert len(translations) == 3
    assert runs["translator"].translate(["abcd"], n_best=3, max_len=5) == [translations]
    outputs = runs["translator"].translations("abcd", n_best=3, max_len=5)
    assert [output.text for output in outputs] == translations


def test_keywords_and_objects_choose_the_same_search(runs: dict[str, Any]) -> None:
    run = runs["translator"]
    by_object = run.translations("abcd", search=Sample(0.5, seed=3), limits=Limits(2, 5), wishes=Constraints("ef"))
    assert run.translations("abcd", temperature=0.5, seed=3, min_len=2, max_len=5, prefix="ef") == by_object
    assert run.translations("abcd", temperature=0.5, changes="seed=3", min_len=2, max_len=5, prefix="ef") == by_object


def test_a_small_beam_needs_no_n_best_where_only_the_best_is_used(runs: dict[str, Any]) -> None:
    assert isinstance(runs["other"].translate("abcd", beam=1, max_len=4), str)
    with pytest.raises(SpecError, match="beam size 1 is too small for 2 outputs, which the recipe sets"):
        runs["other"].translations("abcd", beam=1, max_len=4)


def test_an_ensemble_of_one_model_with_itself_is_that_model(runs: dict[str, Any]) -> None:
    run = runs["translator"]
    assert regard.translate([run, run], "abcd", max_len=5) == run.translate("abcd", max_len=5)


@pytest.mark.parametrize("name", ["stream", "lines"])
def test_generate_continues_prompts(runs: dict[str, Any], name: str) -> None:
    (output,) = regard.generate(runs[name], "abcd", temperature=0.7, top_k=5, seed=1, max_len=4)
    assert output.text.startswith("abcd")
    assert len(output.ids) <= 4
    assert [output] == runs[name].generate("abcd", temperature=0.7, top_k=5, seed=1, max_len=4)


def test_streamed_pieces_join_to_the_output(runs: dict[str, Any]) -> None:
    run = runs["translator"]
    assert "".join(run.stream("abcd", beam=1, max_len=5)) == run.translate("abcd", beam=1, max_len=5)


def test_classify_and_score_take_texts_and_lists(runs: dict[str, Any]) -> None:
    prediction = regard.classify(runs["classifier"], "abcd")
    assert regard.classify(runs["classifier"], ["abcd"]) == [prediction]
    score: Any = regard.score(runs["lines"], "abcd efgh")
    assert regard.score(runs["lines"], ["abcd efgh"], batch_size=1) == [score]
    output: Output = runs["translator"].translations("abcd", max_len=5)[0]
    rescored: Any = regard.score(runs["translator"], output)
    assert rescored.log_prob == pytest.approx(output.log_prob, abs=1e-4)


def test_evaluate_reports_what_the_command_prints(runs: dict[str, Any], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("abcd\nefgh ijkl\n")
    report = runs["translator"].evaluate(source=str(text), reference=str(text), beam=1, against=str(text))
    assert report == regard.evaluate(
        runs["translator"], source=str(text), reference=str(text), beam=1, against=str(text)
    )
    assert report["against"]["exact_match"] == pytest.approx(100)
    assert isinstance(report["verdict"], str)
    chosen = runs["translator"].evaluate(source=str(text), reference=str(text), beam=1, metrics="chrf")
    assert "chrf" in chosen
    assert "ter" not in chosen


def test_attention_has_weights_and_tokens_by_side(runs: dict[str, Any]) -> None:
    attention = runs["translator"].attention("abcd efgh", "ijkl")
    cross = attention.weights["decoder.cross"][-1]
    assert cross.shape[1:] == (len(attention.tokens["decoder"]), len(attention.tokens["encoder"]))
    torch.testing.assert_close(cross.sum(-1), torch.ones(cross.shape[:2]))
    assert "decoder.cross" in repr(attention)
    assert attention.tokens["encoder"][0] in attention.draw()
    with pytest.raises(SpecError, match=r"decoder\.cros"):
        attention.draw("decoder.cros")
    compressed = Attention({"decoder": ["a", "b", "c", "d"]}, {"decoder.self": [torch.full((1, 4, 2), 0.5)]})
    assert compressed.draw().split()[:2] == ["1", "2"]  # keys that are not tokens are numbered
    own = runs["translator"].attention("abcd efgh")
    assert own.tokens["encoder"] == attention.tokens["encoder"]


@pytest.mark.parametrize("name", ["translator", "stream", "lines", "classifier"])
def test_hidden_states_have_one_row_for_each_token(runs: dict[str, Any], name: str) -> None:
    hidden = runs[name].hidden_states("abcd efgh")
    assert hidden.states
    for side, layers in hidden.states.items():
        assert all(layer.shape[0] == len(hidden.tokens[side]) for layer in layers)
        assert side in repr(hidden)


def test_the_model_returns_logits_of_a_batch(runs: dict[str, Any]) -> None:
    run = runs["translator"]
    batch = run.batch([("abcd", "efgh"), ("ijkl mnop", "abcd")])
    assert run.model(batch).shape == (*batch.target.shape, run.tokenizer.size)


def test_invalid_calls_are_refused_in_one_sentence(folders: dict[str, Path], runs: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"regard translate, not generate"):
        regard.generate(runs["translator"], "abcd")
    with pytest.raises(DataError, match=r"regard generate, not translate"):
        runs["lines"].translate("abcd")
    with pytest.raises(DataError, match="takes one run, not an ensemble of 2"):
        regard.classify([runs["classifier"]] * 2, "abcd")
    with pytest.raises(DataError, match="no run is given"):
        regard.translate([], "abcd")
    with pytest.raises(SpecError, match="device: the model is already loaded"):
        regard.translate(runs["translator"], "abcd", device="cuda")
    with pytest.raises(SpecError, match="beam: is part of `search`"):
        runs["translator"].translate("abcd", beam=2, search=Beam(3))
    with pytest.raises(DataError, match="does not exist"):
        regard.translate(folders["translator"] / "nowhere", "abcd")
    with pytest.raises(SpecError, match="--set: n_best is set by --n-best"):
        runs["translator"].translate("abcd", n_best=2, changes="n_best=3")
    unknown: Any = {"beams": 2}
    with pytest.raises(TypeError, match="beams"):
        runs["translator"].translate("abcd", **unknown)


@pytest.mark.parametrize("name", ["stream", "lines"])
def test_language_model_is_evaluated_with_attention_windows(name: str, runs: dict[str, Any], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("abcd efgh ijkl abcd\n" * 20)
    run = runs[name]
    report = run.evaluate(text=str(text), windows=(6, 2))
    whole = run.evaluate(text=str(text))
    rows = report.pop("windows")
    assert report == whole
    assert [row["window"] for row in rows] == [2, 6]
    assert all(row.keys() == {"window", "loss", "perplexity", "bits_per_byte", "nats_per_character"} for row in rows)
    assert len({whole["loss"], *(row["loss"] for row in rows)}) == 3
    assert run.evaluate(text=str(text), windows="2,6", metrics="loss")["windows"] == [
        {"window": row["window"], "loss": row["loss"]} for row in rows
    ]
    plain = regard.load(run.path, "cpu", plain=True).evaluate(text=str(text), windows="2,6")["windows"]
    assert [row["loss"] for row in plain] == pytest.approx([row["loss"] for row in rows], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "windows", "message"),
    [
        ("stream", "2,1000000", "--windows: 1000000 tokens limit nothing, because the model reads at most"),
        ("lines", (50,), "--windows: 50 tokens limit nothing"),
        ("stream", "two", "--windows: 'two' is not a list of whole numbers"),
        ("stream", (0,), "--windows: a window must hold at least one token, not 0"),
        ("translator", "2", "--windows: would be ignored"),
        ("classifier", "2", "--windows: would be ignored"),
    ],
)
def test_windows_without_effect_are_refused(
    name: str, windows: Any, message: str, runs: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("abcd efgh ijkl abcd\n" * 20)
    with pytest.raises(SpecError, match=message):
        runs[name].evaluate(text=str(tmp_path / "text"), windows=windows)
