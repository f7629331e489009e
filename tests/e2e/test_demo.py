"""The demo with less text: it trains, tests, draws attention, and leaves a run that can be used."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from regard.demo import run as demo
from regard.demo.corpus import Corpus, generate

from .conftest import regard


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same demo with less text; `make demo` shows what it learns from all of it."""
    monkeypatch.setattr(demo, "PAIRS", 1500)
    monkeypatch.setattr(demo, "SUBWORDS", 400)
    monkeypatch.setattr(demo, "VALIDATION", 20)

    monkeypatch.setattr(demo, "generate", fewer)


@cache
def fewer(pairs: int, language: str, seed: int) -> Corpus:
    corpus = generate(pairs, language, seed)
    assert len(corpus.test) > 500
    return replace(corpus, test=corpus.test[:60])  # an untrained model generates up to the length limit


@pytest.mark.usefixtures("small")
def test_demo_trains_draws_attention_and_leaves_a_run(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    result = regard("demo", "--out", str(run), "--steps", "8")
    assert result.returncode == 0, result.stderr
    assert "held-out examples are translated without any error" in result.stdout
    assert "Cross-attention (last layer, mean of heads)" in result.stdout
    assert "| regard translate" in result.stdout
    assert "regard train --source mine.en" in result.stdout
    assert (run / "attention.png").read_bytes().startswith(b"\x89PNG")
    training = {line.split("\t")[0] for line in (run / "text" / "train.tsv").read_text().splitlines()}
    held_out = {line.split("\t")[0] for line in (run / "text" / "test.tsv").read_text().splitlines()}
    assert len(held_out) == 40
    assert not training & held_out
    assert regard("translate", str(run), "--beam", "1", stdin=b"four hundred\n").returncode == 0


@pytest.mark.usefixtures("small")
def test_other_language_and_json_output(tmp_path: Path) -> None:
    result = regard("demo", "--language", "fr", "--steps", "2", "--json", "--out", str(tmp_path / "fr"))
    record = json.loads(result.stdout)
    assert {"exact_match", "bleu", "seconds", "run"} <= set(record)
    assert record["language"] == "fr"
    result = regard("demo", "--language", "xx", "--out", str(tmp_path / "xx"))
    assert result.returncode == 2
    assert not (tmp_path / "xx").exists()


@pytest.mark.usefixtures("small")
def test_demo_without_out_creates_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)  # left by an earlier demo
    assert regard("demo", "--steps", "1", "-q", cwd=tmp_path).returncode == 0
    assert (tmp_path / "runs" / "demo-2" / "recipe.json").exists()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"demo", "demo-2"}


def test_demo_ends_by_offering_the_lens() -> None:
    last = demo.NEXT.rstrip().splitlines()[-1].split("#")[0]
    assert last.format(folder="runs/demo").strip() == "regard lens runs/demo"
