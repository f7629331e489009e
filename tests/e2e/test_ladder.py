"""regard ladder: a small ladder, its continuation, and invalid options."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from regard.ablation import plan
from regard.ablation.experiment import Settings
from regard.ablation.ladder import ladder, rates
from regard.ablation.parallel import Resources
from regard.errors import SpecError
from regard.runs.request import request_from_options

from .conftest import complaint, regard, write

SMALL = (
    "--set", "model.d_model=16", "--set", "model.encoder.depth=1", "--set", "model.decoder.depth=1",
    "--set", "data.tokenizer.vocab=290", "--set", "data.batching.tokens=200", "--set", "data.held_out=50",
    "--set", "data.max_len=20", "--set", "train.decode=20", "--jobs", "1",
)  # fmt: skip


def command(corpus: dict[str, str], out: Path, *options: str) -> tuple[str, ...]:
    files = ("--source", corpus["source"], "--target", corpus["target"])
    return ("ladder", *files, "--out", str(out), *SMALL, *options)


@pytest.fixture(scope="module")
def straight(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ladder") / "straight"
    result = regard(*command(corpus, out, "--rungs", "rnn,no_feed_forward", "--steps", "16", "--seeds", "1"))
    assert result.returncode == 0, result.stderr
    assert "3/3" in result.stderr
    assert "by source length" in result.stdout
    return out


def test_a_ladder_has_scores_paths_and_plots(straight: Path) -> None:
    output = json.loads((straight / "ladder.json").read_text())
    assert output["complete"]
    assert [row["name"] for row in output["rows"]] == ["rnn", "no_feed_forward", "transformer"]
    sizes = [row["parameters"] for row in output["rows"]]
    assert max(abs(size / sizes[-1] - 1) for size in sizes) < 0.05
    for row in output["rows"]:
        assert row["low"] <= row["metric"] <= row["high"]
        assert row["tokens_per_second"] > 0
        assert row["steps"] == 16
        assert row["path_length"] == (2 if row["name"] != "rnn" else 3 * output["sequence_length"])
        assert len(row["buckets"]) == len(output["buckets"])
    assert sum(bucket["lines"] for bucket in output["buckets"]) == 20
    assert (straight / "ladder.html").read_text().count("<svg") == 3
    assert not list(straight.rglob("*.safetensors"))


def test_finished_runs_are_not_repeated_and_seconds_set_the_steps_of_each_rung(
    corpus: dict[str, str], straight: Path
) -> None:
    again = ("--rungs", "rnn,no_feed_forward", "--steps", "16", "--seeds", "1")
    result = regard(*command(corpus, straight, *again, "--json"))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert [row["steps"] for row in json.loads(result.stdout)["rows"]] == [16, 16, 16]
    result = regard(*command(corpus, straight, "--rungs", "no_norm", "--seconds", "0.2", "--seeds", "1"))
    assert result.returncode == 0, result.stderr
    assert "steps in 0.2 s" in result.stderr
    output = json.loads((straight / "ladder.json").read_text())
    assert (output["seconds"], output["steps"]) == (0.2, None)
    assert all(row["seconds"] > 0 for row in output["rows"])


def test_learning_rates_searched_on_one_text_are_used_on_another(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "FACTORS", (1.0, 2.0))
    changes = [value for value in SMALL[1:-2] if value != "--set"]
    request = request_from_options(source=corpus["source"], target=corpus["target"], changes=changes)
    output = rates(request, tmp_path / "rates", "no_norm", Settings(steps=8), Resources("cpu", 1))
    assert output.keys() == {"no_norm", "transformer"}
    assert set(output.values()) <= {1.0, 2.0}
    runs = [json.loads(line) for line in (tmp_path / "rates" / "results.jsonl").read_text().splitlines()]
    assert len(runs) == 4
    settings = Settings(seeds=1, steps=8, rates={"no_norm": 2.0})
    ladder_result = ladder(request, tmp_path / "runs", "no_norm", settings, Resources("cpu", 1))
    runs = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    assert {run["row"]: run["factor"] for run in runs} == {"no_norm": 2.0, "transformer": 1.0}
    assert "learning rate x 2" in ladder_result.rungs[0].note
    for wrong in (replace(settings, search_rates=True), replace(settings, rates={"no_nrm": 2.0})):
        with pytest.raises(SpecError, match="rates"):
            ladder(request, tmp_path / "runs", "no_norm", wrong, Resources("cpu", 1))


def test_invalid_options_are_refused(corpus: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "unknown rung 'rnm'" in complaint(*command(corpus, out, "--rungs", "rnm"))
    assert "--seconds: must be more than 0" in complaint(*command(corpus, out, "--seconds", "0"))
    assert "give one of them" in complaint(*command(corpus, out, "--seconds", "3", "--steps", "30"))
    assert "--seeds" in complaint(*command(corpus, out, "--seeds", "0"))
    assert "is not a metric of translations" in complaint(*command(corpus, out, "--metric", "perplexity"))
    assert "cannot read packed rows" in complaint(
        *command(corpus, out, "--set", "data.batching={kind='packing', length=64}")
    )
    assert "train.average: is not used here" in complaint(*command(corpus, out, "--set", "train.average=3"))
    assert not out.exists()
    assert "no such file" in complaint("ladder", "--tsv", str(tmp_path / "nowhere.tsv"), "--out", str(out))
    recipe = tmp_path / "recipe.json"
    labelled = write(tmp_path / "labelled", [f"{i % 2}\tline {i}" for i in range(100)])
    data = {"train": [{"kind": "labelled", "path": labelled}], "objective": "classification"}
    recipe.write_text(json.dumps({"data": data}))
    assert "pairs of texts" in complaint("ladder", str(recipe), "--out", str(out))
