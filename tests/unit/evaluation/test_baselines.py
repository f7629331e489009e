"""Baselines of prepared data: measured, stored, printed and compared with a model."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.data.batching import Buckets, Windows
from regard.data.loader import BatchLoader, Examples
from regard.data.objectives import Classification, LanguageModelling, Summarization
from regard.data.prepare import DataSpec, Prepared, prepare
from regard.data.text import TSV, Labelled, Lines
from regard.data.token_store import Column, Table
from regard.data.tokenizer import Bytes, Characters, Words
from regard.errors import DataError
from regard.evaluation import baselines
from regard.evaluation.baselines import Baseline, compare, measure, report, sentence, stored
from regard.evaluation.metrics import bleu, chrf, metric
from regard.training.checkpoint import RunFolder
from regard.training.spec import TrainSpec

RNG = random.Random(1)
TRAIN = TrainSpec(bleu_tokenize="13a", decode=3)


def file(path: Path, lines: Sequence[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def translation(
    folder: Path, valid: Sequence[str] = ("hello big world\thallo", "a b\ta b", "c\tja", "d\tja")
) -> Prepared:
    text = file(folder / "train", ["one\teins", "two\tja", "three\tdrei", "four\tja", "five\teins", "six\tja"])
    held_out = (TSV(file(folder / "valid", valid)),) if valid else ()
    spec = DataSpec((TSV(text),), held_out, tokenizer=Characters(), held_out=None if valid else 0)
    return prepare(spec, folder / "data", 1)


def questions(count: int) -> list[str]:
    kinds = {"place": ["where", "city"], "person": ["who", "writer"], "date": ["when", "year"]}
    lines = []
    for _ in range(count):
        label = RNG.choices(list(kinds), (5, 2, 2))[0]
        lines.append(f"{label}\t" + " ".join([RNG.choice(kinds[label]), *RNG.choices(["is", "was", "the", "of"], k=5)]))
    return lines


def test_translation_is_measured_on_the_records_that_validation_decodes(tmp_path: Path) -> None:
    copying, frequent = measure(translation(tmp_path), TRAIN)
    references = ["hallo", "a b", "ja"]
    assert (copying.name, frequent.name) == ("copying the source", "most frequent target")
    for baseline, outputs in ((copying, ["hello big world", "a b", "c"]), (frequent, ["ja"] * 3)):
        assert baseline.metrics["bleu"] == bleu(outputs, references).value
        assert baseline.metrics["chrf"] == chrf(outputs, references).value
        assert baseline.metrics["exact_match"] == pytest.approx(100 / 3)
        assert baseline.share == 1


def test_no_baseline_is_measured_without_validation_text(tmp_path: Path) -> None:
    assert measure(translation(tmp_path, ()), TRAIN) == []
    (tmp_path / "other").mkdir()
    assert measure(translation(tmp_path / "other"), TrainSpec(decode=0, bleu_tokenize="13a")) == []


@pytest.mark.parametrize("tokenizer", [Bytes(), Words()], ids=lambda spec: spec.kind)
def test_baselines_of_a_classifier(tmp_path: Path, tokenizer: Any) -> None:
    text, held_out = questions(300), questions(60)
    corpora = Labelled(file(tmp_path / "train", text)), Labelled(file(tmp_path / "valid", held_out))
    spec = DataSpec(corpora[:1], corpora[1:], Classification(), tokenizer=tokenizer)
    majority, bag = measure(prepare(spec, tmp_path / "data", 1), TRAIN)
    share = sum(line.startswith("place\t") for line in held_out) / 60
    assert (majority.name, majority.metrics) == ("majority class", {"accuracy": pytest.approx(100 * share)})
    assert (bag.name, bag.metrics) == ("bag of words", {"accuracy": 100.0})


def test_a_sample_keeps_texts_with_their_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpora = [Labelled(file(tmp_path / name, questions(400))) for name in ("a", "b", "valid")]
    spec = DataSpec((*corpora[:2],), (corpora[2],), Classification(), tokenizer=Words())
    data = prepare(spec, tmp_path / "data", 1)
    monkeypatch.setattr(baselines, "BAG_TOKENS", 1000)
    (_, bag), again = measure(data, TRAIN), measure(data, TRAIN)
    assert bag.share == pytest.approx(1000 / 5600, abs=0.01)
    assert bag.metrics["accuracy"] == 100
    assert again[1] == bag
    monkeypatch.setattr(baselines, "BAG_WORK", 3 * 700)
    assert measure(data, TRAIN)[1].share == pytest.approx(700 / 5600, abs=0.01)


@pytest.mark.parametrize("unit", ["stream", "lines"])
def test_a_language_model_predicts_the_tokens_that_validation_counts(tmp_path: Path, unit: Any) -> None:
    lines = ["".join(RNG.choices("abab cd", k=RNG.randint(3, 40))) for _ in range(200)]
    spec = DataSpec((Lines(file(tmp_path / "text", lines)),), objective=LanguageModelling(unit), tokenizer=Characters())
    data = prepare(spec, tmp_path / "data", 1)
    (baseline,) = measure(data, TRAIN)
    assert data.valid is not None
    batching = Windows(tokens=64, length=16) if unit == "stream" else Buckets(tokens=200)
    tokens = sum(item.labels for item in BatchLoader(Examples([data.valid], [1.0], data.objective), batching, 0).once())
    loss = baseline.metrics["loss"]
    assert baseline.name == "4-gram model"
    assert 1.0 < loss < 2.5
    assert baseline.metrics["perplexity"] == pytest.approx(np.exp(loss))
    assert baseline.metrics["bits_per_byte"] == pytest.approx(loss * tokens / data.valid_survey.bytes / np.log(2))


def test_a_sample_of_a_stream_is_blocks_of_all_of_it() -> None:
    column = Column(np.arange(100_000, dtype=np.uint32), np.asarray([0, 100_000]))
    rows, _, share = baselines._rows([column], 6400, stream=True)
    assert (len(rows), share) == (64, 0.064)
    assert all((np.diff(row) == 1).all() and len(row) == 100 for row in rows)
    assert rows[0][0] == 0
    assert rows[63][0] == 98_437
    whole, _, share = baselines._rows([column, column], 200_000, stream=True)
    assert (len(whole), share) == (2, 1.0)


def test_a_damaged_table_raises_an_error(tmp_path: Path) -> None:
    data = translation(tmp_path)
    data.train[0] = Table.of(source=[[1]], target=[[10**6]])
    with pytest.raises(DataError, match="is not in the vocabulary"):
        measure(data, TRAIN)


class Recorder(list[Any]):
    """A list of logged events and printed lines."""

    def log(self, event: str, **values: Any) -> None:
        self.append((event, values))


def test_baselines_are_stored_once_and_made_again_if_damaged(tmp_path: Path) -> None:
    folder, data, recorder = RunFolder(tmp_path / "run"), translation(tmp_path), Recorder()
    folder.path.mkdir()
    report(folder, data, TRAIN, metric("loss"), recorder.log, recorder.append)
    (event, values), line = recorder
    assert event == "baselines"
    assert values["baselines"] == json.loads(folder.baselines.read_text())["baselines"]
    assert line == f"baselines on the validation text: {sentence(measure(data, TRAIN), 'auto')}"
    assert stored(folder) == measure(data, TRAIN)
    report(folder, data, TRAIN, metric("loss"), recorder.log, recorder.append)
    assert len(recorder) == 2
    whole = folder.baselines.read_text()
    record = {"name": "n", "metrics": {"bleu": 1.0}, "share": 1.0}
    wrong = [record | {"name": 1}, record | {"metrics": []}, record | {"metrics": {"bleu": "1"}}, record | {"more": 1}]
    wrong += [record | {"metrics": {}}, record | {"metrics": {"bleu": float("nan")}}, record | {"share": None}, 3]
    for damaged in ("", "{", "[]", "{}", '{"baselines": 3}', *(json.dumps({"baselines": [entry]}) for entry in wrong)):
        folder.baselines.write_text(damaged)
        with pytest.raises(DataError, match=r"baselines\.json"):
            stored(folder)
        compare(folder, {"bleu": 0.0}, metric("bleu"), recorder.append)  # compares with nothing
        report(folder, data, TRAIN, metric("loss"), recorder.log, lambda _: None)
        assert folder.baselines.read_text() == whole
    assert [*map(type, recorder)] == [tuple, str, *[tuple] * 13]


def test_no_file_is_written_without_a_baseline(tmp_path: Path) -> None:
    folder, recorder = RunFolder(tmp_path / "run"), Recorder()
    report(folder, translation(tmp_path, ()), TRAIN, metric("loss"), recorder.log, recorder.append)
    assert recorder == []
    assert not folder.path.exists()
    assert stored(folder) == []


def test_baselines_are_summarised_in_one_sentence() -> None:
    classes = [Baseline("majority class", {"accuracy": 22.12}), Baseline("bag of words", {"accuracy": 88.4})]
    assert sentence(classes, "auto") == "majority class 22.1 %, bag of words 88.4 % accuracy"
    pairs = [
        Baseline("copying the source", {"bleu": 1.25, "chrf": 9.0}),
        Baseline("x", {"bleu": 0.0, "chrf": 3.0}, 0.25),
    ]
    sample = "(x: from 25 % of the training text)"
    assert sentence(pairs, "auto") == f"copying the source 1.2, x 0.0 BLEU {sample}"
    assert sentence(pairs, "chrf") == f"copying the source 9.0, x 3.0 chrF {sample}"
    assert sentence([Baseline("4-gram model", {"loss": 4.8123})], "loss") == "4-gram model 4.812 loss"


@pytest.mark.parametrize(
    ("criterion", "scores", "worse"),
    [
        (
            "bleu",
            {"bleu": 4.0, "loss": 9.0},
            "BLEU on the validation text, 4.0, is worse than that of a trivial baseline",
        ),
        ("bleu", {"bleu": 6.0, "chrf": 0.0}, None),
        ("bleu", {"bleu": 5.0}, None),
        ("chrf", {"bleu": 6.0, "chrf": 8.0}, "(copying: 9.0)"),
        ("loss", {"bleu": 2.0, "loss": 1.0}, "(copying: 5.0)"),  # the best of two; the loss was not measured
        ("bleu", {}, None),
    ],
)
def test_a_model_that_is_worse_than_a_baseline_is_warned_of(
    criterion: str, scores: dict[str, float], worse: str | None, tmp_path: Path
) -> None:
    folder, lines = RunFolder(tmp_path), list[str]()
    records = [
        {"name": "constant", "metrics": {"bleu": 3.0, "chrf": 1.0}},
        {"name": "copying", "metrics": {"bleu": 5.0, "chrf": 9.0}},
    ]
    folder.baselines.write_text(json.dumps({"baselines": records}))
    compare(folder, scores, metric(criterion), lines.append)
    assert len(lines) == (worse is not None)
    assert all(line.startswith("warning: ") and str(worse) in line for line in lines)


def test_a_higher_loss_is_worse(tmp_path: Path) -> None:
    folder, lines = RunFolder(tmp_path), list[str]()
    folder.baselines.write_text(json.dumps({"baselines": [{"name": "3-gram model", "metrics": {"loss": 4.0}}]}))
    compare(folder, {"loss": 3.9}, metric("loss"), lines.append)
    assert lines == []
    compare(folder, {"loss": 4.1}, metric("loss"), lines.append)
    assert "loss on the validation text, 4.100, is worse" in lines[0]


def test_baseline_of_a_summary_is_the_first_sentence(tmp_path: Path) -> None:
    text = file(tmp_path / "train", ["One two. Three.\tone", "Four. Five.\tfour"])
    valid = file(tmp_path / "valid", ["A fox runs. It is red.\ta fox", "Snow falls! All day.\tno snow"])
    spec = DataSpec((TSV(text),), (TSV(valid),), Summarization(), tokenizer=Characters())
    first, _ = measure(prepare(spec, tmp_path / "data", 1), TRAIN)
    expected = metric("rougeL").score(["A fox runs.", "Snow falls!"], ["a fox", "no snow"]).value
    assert (first.name, first.metrics["rougeL"]) == ("first sentence", expected)
    assert sentence([first], "rougeL") == f"first sentence {expected:.1f} ROUGE-L"
