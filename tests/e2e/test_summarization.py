"""Summarization from the command line: long documents, ROUGE as criterion, evaluation with significance, ablation."""

import json
import math
import re
from pathlib import Path

import pytest

import regard as package
from regard.data.extraction import best_first
from regard.demo.documents import FactDocuments
from regard.evaluation.metrics import rouge

from .conftest import regard, write

TINY = (
    "--set", "model.d_model=16", "--set", "model.heads=2", "--set", "model.encoder.depth=1",
    "--set", "model.decoder.depth=1", "--set", "data.tokenizer=words", "--set", "data.batching.tokens=400",
    "--set", "train.decode=6", "--steps", "2", "--device", "cpu", "--threads", "1", "--no-cache",
)  # fmt: skip
LIMIT = 14  # the title and three of eight paragraphs


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents") / "facts"
    FactDocuments(paragraphs=8, attributes=2, entities=4, values=4).write(folder, train=60, valid=10, test=10)
    return folder


@pytest.fixture(scope="module")
def run(facts: Path) -> Path:
    out = facts.parent / "run"
    settings = ("--set", f"data.max_len={LIMIT}", "--set", "data.long=extract")
    files = ("--tsv", str(facts / "train.tsv"), "--valid", str(facts / "valid.tsv"))
    result = regard("train", "--task", "summarization", *files, *settings, "--out", str(out), *TINY)
    assert result.returncode == 0, result.stderr
    ranked = f"longer than {LIMIT} tokens (data.max_len) were cut to this length after their paragraphs were ranked"
    assert f"Training text: 60 {ranked}" in " ".join(result.stderr.split())
    assert "Best checkpoint: by ROUGE-L" in result.stderr
    return out


def test_scores_of_a_run_are_rouge(run: Path) -> None:
    assert {"rougeL", "rouge1", "rouge2", "perplexity", "loss"} <= package.load(run, "cpu").scores.keys()


def test_documents_are_extracted_alike_in_training_translation_and_scoring(run: Path, facts: Path) -> None:
    trained = package.load(run, "cpu")
    document, summary = (facts / "test.tsv").read_text().splitlines()[0].split("\t")
    extracted = best_first(document)
    assert extracted != document
    words = " ".join(extracted.split()[:LIMIT])
    batch = trained.batch([(document, summary)])
    assert batch.source is not None
    assert trained.tokenizer.decode(batch.source[0, :-1].tolist()) == words
    warnings: list[str] = []
    outputs = list(trained.translations([document, words], warn=warnings.append))
    assert outputs[0][0].read == outputs[1][0].read == tuple(batch.source[0].tolist())
    assert (
        "these are read after the paragraphs are ranked by tf-idf for the words of the first paragraph" in warnings[0]
    )
    scores = trained.score([(document, summary), (words, summary)])
    assert scores[0].log_prob == scores[1].log_prob


def test_evaluation_reports_rouge_and_the_significance_of_a_difference(run: Path, facts: Path, tmp_path: Path) -> None:
    pairs = [line.split("\t") for line in (facts / "test.tsv").read_text().splitlines()]
    other = tmp_path / "outputs"
    other.write_text("".join(f"{target}\n" for _, target in pairs))
    command = ("evaluate", str(run), "--tsv", str(facts / "test.tsv"), "--against", str(other), "--json")
    result = regard(*command, "--samples", "100")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    outputs = package.load(run, "cpu").translate([source for source, _ in pairs])
    expected = rouge(outputs, [target for _, target in pairs], tokenize="unicode")
    names = ("rouge1", "rouge2", "rougeL")
    assert [report[name] for name in names] == pytest.approx([each.value for each in expected])
    assert [report["against"][name] for name in names] == [100, 100, 100]
    assert list(report["difference"]) == ["rougeL", "rouge1", "rouge2", "chrf"]
    assert report["difference"]["rougeL"]["p_value"] < 0.05
    assert "ROUGE-L" in report["verdict"]


def test_evaluation_reads_documents_of_several_lines_from_json(run: Path, facts: Path, tmp_path: Path) -> None:
    pairs = [line.split("\t") for line in (facts / "test.tsv").read_text().splitlines()]
    lined = [(source.replace(" . ", " .\n"), target) for source, target in pairs]
    records = [json.dumps({"source": source, "target": target}) for source, target in lined]
    write(tmp_path / "test.jsonl", records)
    trained = package.load(run, "cpu")
    report = trained.evaluate(jsonl=str(tmp_path / "test.jsonl"))
    scores = trained.score(lined)
    mean = sum(score.log_prob for score in scores) / sum(score.tokens for score in scores)
    assert report["lines"] == len(pairs)
    assert report["perplexity"] == pytest.approx(math.exp(-mean))
    assert report["perplexity"] != pytest.approx(trained.evaluate(tsv=str(facts / "test.tsv"))["perplexity"])
    refused = regard("evaluate", str(run), "--tsv", "a.tsv", "--jsonl", str(tmp_path / "test.jsonl"))
    assert refused.returncode == 2
    assert "--jsonl: would be ignored here" in " ".join(refused.stderr.split())


PAGE = (Path(__file__).parents[2] / "docs" / "summarization.md").read_text(encoding="utf-8")


def test_programs_of_the_page_run_and_its_table_of_optima_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FactDocuments, "write", lambda *_, **__: None)  # tested with the generator
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        exec(block, {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in PAGE.splitlines() if line.startswith("|")}
    for column, name in enumerate(("`data.max_len`", "optimum, `data.long=cut`", "optimum, `data.long=extract`")):
        assert [float(cell) for cell in rows[name]] == pytest.approx([float(r[column]) for r in printed], abs=0.005)


def test_a_decoder_only_model_trains_on_all_tokens_from_the_command_line(tmp_path: Path) -> None:
    """The command of the page, shortened."""
    write(tmp_path / "emails.tsv", [f"dear reader {n} . we met .\tmeeting {n}" for n in range(40)])
    command = next(line for line in PAGE.splitlines() if "loss_on=all" in line and line.startswith("regard train"))
    words = [str(tmp_path / word) if word in ("emails.tsv", "runs/d") else word for word in command.split()[1:]]
    short = ("--set", "model.d_model=16", "--set", "train.decode=2", "--steps", "2", "--device", "cpu", "--no-cache")
    result = regard(*words, *short, "--threads", "1")
    assert result.returncode == 0, result.stderr
    trained = package.load(tmp_path / "runs" / "d", "cpu")
    assert trained.model.predicts_source
    pair = [("dear reader 3 . we met .", "meeting 3")]
    batch = trained.batch(pair)
    assert trained.model.loss(batch).tokens == trained.score(pair)[0].tokens < trained.model.train().loss(batch).tokens
