"""Trivial baselines of a run: printed, logged, in the JSON, and a warning if the model is worse."""

import json
from pathlib import Path

from .conftest import regard, training, write

TINY = (
    "--set", "model.d_model=16", "--set", "model.heads=2", "--set", "model.encoder.depth=1",
    "--set", "data.tokenizer=bytes", "--set", "train.steps=1", "--set", "train.average=1", "--device", "cpu",
    "--threads", "1",
)  # fmt: skip


def labelled(path: Path, count: int) -> str:
    """Two classes that differ in one word, which a model of bytes learns only after many steps."""
    return write(path, [f"{'ab'[i % 2]}\tnumber {i} is {('odd', 'even')[i % 2]} or not" for i in range(count)])


def test_classifier_worse_than_a_bag_of_words_is_warned_about(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    text, held_out = labelled(tmp_path / "text", 80), labelled(tmp_path / "valid", 20)
    result = regard("train", "--labelled", text, "--valid", held_out, "--out", out, *TINY)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert "Baselines on the validation text: majority class 50.0 %, bag of words 100.0 % accuracy" in lines
    (warning,) = (line for line in lines if line.startswith("warning: the model's accuracy"))
    assert "(bag of words: 100.0 %); train for longer or on more text" in warning
    events = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "baselines")
    assert events.index(event) == 0
    expected = [
        {"name": "majority class", "metrics": {"accuracy": 50.0}, "share": 1.0},
        {"name": "bag of words", "metrics": {"accuracy": 100.0}, "share": 1.0},
    ]
    assert event["baselines"] == expected
    assert json.loads(regard("show", out, "--json").stdout)["baselines"] == expected
    assert "baselines        majority class 50.0 %, bag of words 100.0 % accuracy" in regard("show", out).stdout


def test_baselines_are_in_the_summary_and_computed_once(corpus: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    few = ("--set", "train.steps=2", "--set", "train.validate_every=1")
    result = regard(*training(corpus, out, *few), "--json", "--max-time", "0.01")
    assert result.returncode == 0, result.stderr
    first = json.loads(result.stdout)
    assert [baseline["name"] for baseline in first["baselines"]] == ["copying the source", "most frequent target"]
    assert {*first["baselines"][0]["metrics"]} == {"bleu", "chrf", "exact_match"}
    assert first["baselines"] == json.loads((out / "baselines.json").read_text())["baselines"]
    again = regard("resume", str(out), "--json")
    assert json.loads(again.stdout)["baselines"] == first["baselines"]
    assert (out / "log.jsonl").read_text().count('"event": "baselines"') == 1


def test_run_without_validation_text_has_no_baselines(corpus: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = regard(*training(corpus, out, "--set", "train.steps=1", "--set", "data.held_out=0"), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["baselines"] == []
    assert not (out / "baselines.json").exists()
