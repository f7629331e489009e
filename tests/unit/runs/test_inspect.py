"""`regard.inspect`, `regard.attention` and the command `regard attention` on runs of every task."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.data.objectives import Translation
from regard.decoding.sample import Sample
from regard.errors import DataError, SpecError
from regard.runs.inspect import Attention
from tests.unit.decoding.untrained import LINES, STREAM, TWO, complaint, printed, untrained

DEPTHS: dict[str, Any] = {"encoder.depth": 2, "decoder.depth": 3}


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
        "translator": untrained(folder / "translator", Translation(), **DEPTHS),
        "stream": untrained(folder / "stream", STREAM, Sample()),
        "lines": untrained(folder / "lines", LINES, Sample()),
        "classifier": untrained(folder / "classifier", TWO),
    }


@pytest.fixture(scope="module")
def runs(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: regard.load(path, "cpu") for name, path in folders.items()}


def test_mixtures_of_tokens_are_numbered() -> None:
    """The keys of a Linformer are not the tokens of the text, even if there are as many."""
    tokens = {"encoder": ("left", "right")}
    weights = {"encoder.self": [torch.eye(2)[None]], "encoder.mixtures": [torch.rand(1, 2, 3), torch.eye(2)[None]]}
    attention = Attention(tokens, weights)
    assert attention.draw("encoder.self").splitlines()[0].split() == ["left", "right"]
    assert attention.draw("encoder.mixtures").splitlines()[0].split() == ["1", "2"]
    assert attention.draw("encoder.mixtures", layer=0).splitlines()[0].split() == ["1", "2", "3"]


def test_a_translator_reads_the_tokens_that_it_generates(runs: dict[str, Any]) -> None:
    run = runs["translator"]
    output = run.translations("abcd efgh")[0]
    recording = run.inspect("abcd efgh")
    assert recording.ids["encoder"] == list(output.read)
    assert recording.ids["decoder"] == [run.tokenizer.bos, *output.ids]
    known = [p for p in recording.predictions if p.id is not None]
    assert [p.id for p in known] == [*output.ids, *([run.tokenizer.eos] if output.ended else [])]
    log_prob = sum(torch.tensor([p.probability for p in known], dtype=torch.float64).log())
    assert float(log_prob) == pytest.approx(output.log_prob, abs=1e-3)


def test_a_given_target_is_read_instead(runs: dict[str, Any]) -> None:
    run = runs["translator"]
    recording = run.inspect("abcd efgh", "ijkl", top=3)
    assert recording.tokens["decoder"][0] == "<s>"
    assert "".join(recording.tokens["decoder"][1:]) == "ijkl"
    assert recording.predictions[-1].token == "</s>"
    assert all(len(p.alternatives) == 3 for p in recording.predictions)
    assert regard.inspect(run, "abcd efgh", "ijkl", top=3).predictions == recording.predictions


def test_a_path_is_loaded_with_options(folders: dict[str, Path]) -> None:
    recording = regard.inspect(folders["lines"], "abcd", device="cpu", plain=True)
    assert recording.tokens["decoder"][0] == "<s>"
    with pytest.raises(SpecError, match="device: the model is already loaded"):
        regard.inspect(regard.load(folders["lines"], "cpu"), "abcd", device="cpu")


@pytest.mark.parametrize("name", ["stream", "lines"])
def test_a_language_model_predicts_each_next_token_of_a_long_text(runs: dict[str, Any], name: str) -> None:
    """A text longer than a window of training is recorded whole, in one row."""
    run, text = runs[name], "abcd efgh " * 20
    ids = [*run.begin, *run.tokenizer.encode(text)]
    recording = run.inspect(text)
    assert recording.ids["decoder"] == ids
    assert [p.id for p in recording.predictions] == [*ids[1:], None]
    with torch.no_grad():
        log_probs = run.model.log_probs(regard.Batch(torch.tensor([ids])))[0]
    for t, prediction in enumerate(recording.predictions[:-1]):
        assert prediction.probability == pytest.approx(float(log_probs[t, ids[t + 1]].exp()), rel=1e-3)


def test_a_classifier_has_one_prediction_with_its_classes(runs: dict[str, Any]) -> None:
    recording = runs["classifier"].inspect("abcd efgh")
    predicted = runs["classifier"].classify("abcd efgh")
    (only,) = recording.predictions
    assert only.token == predicted.label
    assert {a.token: a.probability for a in only.alternatives} == pytest.approx(predicted.probabilities, abs=1e-6)
    assert recording.attention == {}
    long = runs["classifier"].inspect("abcd " * 100)
    assert len(long.ids["encoder"]) == 21  # data.max_len, and bos


def test_texts_that_cannot_be_read_are_refused(runs: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="text: is empty"):
        runs["translator"].inspect("")
    with pytest.raises(DataError, match="text: is empty"):
        runs["stream"].inspect("")
    with pytest.raises(DataError, match=r"target: .* reads a single text, and no target"):
        runs["lines"].inspect("abcd", "efgh")
    with pytest.raises(DataError, match="this model has no attention"):
        regard.attention(runs["classifier"], "abcd")


def test_the_fast_form_of_a_run_is_recorded_like_the_plain_form(folders: dict[str, Path], runs: dict[str, Any]) -> None:
    plain = regard.inspect(folders["translator"], "abcd efgh", "ijkl mnop", plain=True)
    quick = runs["translator"].inspect("abcd efgh", "ijkl mnop")
    for kind, layers in plain.attention.items():
        for mine, its in zip(quick.attention[kind], layers, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=0)  # float32, and large weights


def test_words_are_drawn_instead_of_subwords(runs: dict[str, Any]) -> None:
    recording = runs["translator"].inspect("abcdx efghy", "ijklm")
    lines = recording.draw("decoder.cross", words=True).splitlines()
    assert lines[0].split() == ["abcdx", "efghy", "</s>"]
    whole = recording.weights("decoder.cross", 1, 0)
    grouped = recording.by_word("decoder.cross", 1, 0)
    keys = recording.words["encoder"]
    rows = recording.words["decoder"]
    for i in range(rows[-1] + 1):
        for j in range(keys[-1] + 1):
            cells = [whole[t, s] for t, w in enumerate(rows) if w == i for s, v in enumerate(keys) if v == j]
            assert float(grouped[i, j]) == pytest.approx(float(sum(cells)) / rows.count(i), abs=1e-6)
    assert torch.equal(recording.to_words().weights("decoder.cross", 1, 0), grouped)


def test_the_command_prints_a_matrix_of_80_columns(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = folders["translator"]
    words = ("attention", run, "abcd efgh, ijkl", "--target", "mnop abcd", "--words", "--device", "cpu")
    lines = printed(*words).splitlines()
    assert lines[0] == "decoder.cross, layer 2 of 0 to 2, mean of 2 heads. Rows: queries. Columns: keys."
    assert lines[2].split() == ["abcd", "efgh", ",", "ijkl", "</s>"]
    assert [line.split()[0] for line in lines[3:6]] == ["<s>", "mnop", "abcd"]
    assert max(map(len, lines)) <= 80
    one = printed(*words, "--kind", "encoder.self", "--layer", "1", "--head", "0").splitlines()
    assert one[0] == "encoder.self, layer 1, head 0. Rows: queries. Columns: keys."
    assert printed("attention", folders["stream"], stdin=b"abcd efgh\nijkl\n").splitlines()[2].split()[0] == "abcd"


def test_the_command_writes_pictures_and_json(folders: dict[str, Path], tmp_path: Path) -> None:
    words = ("attention", folders["translator"], "abcd efgh", "--target", "mnop")
    for name in ("grid.png", "grid.svg"):
        assert str(tmp_path / name) in printed(*words, "--out", tmp_path / name).replace("\n", "")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "grid.svg").read_text()
    assert [f"layer {n} head {h}" in svg for n in range(3) for h in range(2)] == [True] * 6
    printed(*words, "--layer", "1", "--head", "1", "--out", tmp_path / "one.svg")
    assert "decoder.cross, layer 1, head 1" in (tmp_path / "one.svg").read_text()
    printed(*words, "--kind", "decoder.self", "--out", tmp_path / "a.json")
    record = json.loads((tmp_path / "a.json").read_text())
    assert record == json.loads(printed(*words, "--kind", "decoder.self", "--json"))
    assert list(record["attention"]) == ["decoder.self"]
    T = len(record["tokens"]["decoder"])
    assert [len(record["attention"]["decoder.self"]), len(record["attention"]["decoder.self"][0][0])] == [3, T]
    by_word = json.loads(printed(*words, "--words", "--json"))
    assert by_word["tokens"]["encoder"] == ["abcd", "efgh", "</s>"]


def test_a_json_file_has_the_selected_kind_and_layer(runs: dict[str, Any], tmp_path: Path) -> None:
    recording = runs["translator"].inspect("abcd efgh", "ijkl")
    recording.save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(json.dumps(recording.to_dict()))
    recording.save(tmp_path / "a.json", "encoder.self", 1)
    some = json.loads((tmp_path / "a.json").read_text())
    assert some["layers"] == {"encoder.self": [1]}
    assert some["attention"]["encoder.self"] == [recording.to_dict()["attention"]["encoder.self"][1]]
    assert some["predictions"]


def test_the_same_picture_has_the_same_bytes(runs: dict[str, Any], tmp_path: Path) -> None:
    recording = runs["translator"].inspect("abcd efgh", "ijkl")
    for name in ("a.svg", "b.svg"):
        recording.save(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "decoder.crossing"], "there is no 'decoder.crossing' attention; did you mean 'decoder.cross'?"),
        (["--kind", "cross"], "kind: there is no 'cross' attention; did you mean 'decoder.cross'?"),
        (["--layer", "7"], "there is no layer 7; there are 3, counted from 0"),
        (["--kind", "encoder.self", "--layer", "2"], "there is no layer 2; there are 2, counted from 0"),
        (["--head", "5"], "head: there is no head 5; this layer has 2"),
        (["--head", "1", "--json"], "--head: applies to pictures; --json prints all heads"),
        (["--head", "1", "--out", "a.json"], "head: a JSON file has all heads of a layer; leave it out"),
        (["--out", "a.gif"], "the ending must be .png, .svg or .json"),
        (["--out", "nowhere/a.png"], "nowhere does not exist; create this folder first"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], message: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in complaint("attention", folders["translator"], "abcd", "--target", "x", *options)
    assert list(tmp_path.iterdir()) == []


def test_missing_text_and_missing_attention_are_refused(folders: dict[str, Path]) -> None:
    assert "standard input is empty" in complaint("attention", folders["translator"], stdin=b"\n")
    assert "this model has no attention" in complaint("attention", folders["classifier"], "abcd")
    assert "no target; leave it out" in complaint("attention", folders["lines"], "abcd", "--target", "x")


@pytest.mark.parametrize("kind", ["states", "attention", "decoder_cross"])
def test_a_part_of_a_recording_is_no_kind_of_attention(runs: dict[str, Any], kind: str) -> None:
    with pytest.raises(SpecError, match=f"kind: there is no '{kind}' attention"):
        regard.attention(runs["translator"], "one two", kind=kind)
