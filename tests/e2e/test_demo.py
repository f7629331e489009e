"""The demo, made small: it trains, tests, shows, and leaves a run that can be used."""

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
    """The same demo with less text; what it learns from all of it is what `make demo` measures."""
    monkeypatch.setattr(demo, "PAIRS", 1500)
    monkeypatch.setattr(demo, "PIECES", 400)
    monkeypatch.setattr(demo, "VALIDATION", 20)

    monkeypatch.setattr(demo, "generate", fewer)


@cache
def fewer(pairs: int, language: str, seed: int) -> Corpus:
    corpus = generate(pairs, language, seed)
    assert len(corpus.test) > 500
    return replace(corpus, test=corpus.test[:60])  # who has learned nothing says all that it may


@pytest.mark.usefixtures("small")
def test_the_demo_trains_shows_and_leaves_a_run(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    said = regard("demo", "--out", str(run), "--steps", "8")
    assert said.returncode == 0, said.stderr
    assert "held-out examples are right to the letter" in said.stdout
    assert "Where it looked in" in said.stdout
    assert "| regard translate" in said.stdout
    assert (run / "attention.png").read_bytes().startswith(b"\x89PNG")
    training = {line.split("\t")[0] for line in (run / "text" / "train.tsv").read_text().splitlines()}
    held_out = {line.split("\t")[0] for line in (run / "text" / "test.tsv").read_text().splitlines()}
    assert len(held_out) == 40
    assert not training & held_out
    assert regard("translate", str(run), "--beam", "1", stdin=b"four hundred\n").returncode == 0


@pytest.mark.usefixtures("small")
def test_other_languages_and_one_document_on_stdout(tmp_path: Path) -> None:
    said = regard("demo", "--language", "fr", "--steps", "2", "--json", "--out", str(tmp_path / "fr"))
    result = json.loads(said.stdout)
    assert {"exact_match", "bleu", "seconds", "run"} <= set(result)
    assert result["language"] == "fr"
    said = regard("demo", "--language", "xx", "--out", str(tmp_path / "xx"))
    assert said.returncode == 2
    assert not (tmp_path / "xx").exists()


@pytest.mark.usefixtures("small")
def test_without_a_folder_each_demo_gets_its_own(tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)  # of an earlier demo
    assert regard("demo", "--steps", "1", "-q", cwd=tmp_path).returncode == 0
    assert (tmp_path / "runs" / "demo-2" / "recipe.json").exists()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"demo", "demo-2"}
