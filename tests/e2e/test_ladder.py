"""regard ladder: a ladder of a few seconds, climbed once, and what it refuses."""

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


def climb(corpus: dict[str, str], out: Path, *more: str) -> tuple[str, ...]:
    files = ("--source", corpus["source"], "--target", corpus["target"])
    return ("ladder", *files, "--out", str(out), *SMALL, *more)


@pytest.fixture(scope="module")
def straight(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ladder") / "straight"
    said = regard(*climb(corpus, out, "--rungs", "rnn,no_feed_forward", "--steps", "16", "--seeds", "1"))
    assert said.returncode == 0, said.stderr
    assert "3/3" in said.stderr
    assert "by source length" in said.stdout
    return out


def test_a_ladder_has_all_that_is_promised(straight: Path) -> None:
    found = json.loads((straight / "ladder.json").read_text())
    assert found["complete"]
    assert [row["name"] for row in found["rows"]] == ["rnn", "no_feed_forward", "transformer"]
    sizes = [row["parameters"] for row in found["rows"]]
    assert max(abs(size / sizes[-1] - 1) for size in sizes) < 0.05
    for row in found["rows"]:
        assert row["low"] <= row["metric"] <= row["high"]
        assert row["tokens_per_second"] > 0
        assert row["steps"] == 16
        assert row["path_length"] == (2 if row["name"] != "rnn" else 3 * found["sequence_length"])
        assert len(row["buckets"]) == len(found["buckets"])
    assert sum(one["lines"] for one in found["buckets"]) == 20
    assert (straight / "ladder.html").read_text().count("<svg") == 3
    assert not list(straight.rglob("*.safetensors"))


def test_what_is_done_is_not_repeated_and_seconds_are_every_rungs_own(corpus: dict[str, str], straight: Path) -> None:
    again = ("--rungs", "rnn,no_feed_forward", "--steps", "16", "--seeds", "1")
    said = regard(*climb(corpus, straight, *again, "--json"))
    assert said.returncode == 0, said.stderr
    assert said.stderr == ""
    assert [row["steps"] for row in json.loads(said.stdout)["rows"]] == [16, 16, 16]
    said = regard(*climb(corpus, straight, "--rungs", "no_norm", "--seconds", "0.2", "--seeds", "1"))
    assert said.returncode == 0, said.stderr
    assert "steps in 0.2 s" in said.stderr
    found = json.loads((straight / "ladder.json").read_text())
    assert (found["seconds"], found["steps"]) == (0.2, None)
    assert all(row["seconds"] > 0 for row in found["rows"])


def test_rates_are_found_on_one_text_and_used_on_another(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "FACTORS", (1.0, 2.0))
    changes = [value for value in SMALL[1:-2] if value != "--set"]
    wanted = request_from_options(source=corpus["source"], target=corpus["target"], changes=changes)
    found = rates(wanted, tmp_path / "rates", "no_norm", Settings(steps=8), Resources("cpu", 1))
    assert found.keys() == {"no_norm", "transformer"}
    assert set(found.values()) <= {1.0, 2.0}
    made = [json.loads(line) for line in (tmp_path / "rates" / "results.jsonl").read_text().splitlines()]
    assert len(made) == 4
    known = Settings(seeds=1, steps=8, rates={"no_norm": 2.0})
    climbed = ladder(wanted, tmp_path / "runs", "no_norm", known, Resources("cpu", 1))
    made = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    assert {one["row"]: one["factor"] for one in made} == {"no_norm": 2.0, "transformer": 1.0}
    assert "learning rate x 2" in climbed.rungs[0].note
    for wrong in (replace(known, search_rates=True), replace(known, rates={"no_nrm": 2.0})):
        with pytest.raises(SpecError, match="rates"):
            ladder(wanted, tmp_path / "runs", "no_norm", wrong, Resources("cpu", 1))


def test_what_is_refused(corpus: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "unknown rung 'rnm'" in complaint(*climb(corpus, out, "--rungs", "rnm"))
    assert "--seconds: must be more than 0" in complaint(*climb(corpus, out, "--seconds", "0"))
    assert "give one of them" in complaint(*climb(corpus, out, "--seconds", "3", "--steps", "30"))
    assert "--seeds" in complaint(*climb(corpus, out, "--seeds", "0"))
    assert "cannot be resampled" in complaint(*climb(corpus, out, "--metric", "perplexity"))
    assert "takes no packed rows" in complaint(
        *climb(corpus, out, "--set", "data.batching={kind='packing', length=64}")
    )
    assert "train.average: is not used here" in complaint(*climb(corpus, out, "--set", "train.average=3"))
    assert not out.exists()
    assert "no such file" in complaint("ladder", "--tsv", str(tmp_path / "nowhere.tsv"), "--out", str(out))
    recipe = tmp_path / "recipe.json"
    labelled = write(tmp_path / "labelled", [f"{i % 2}\tline {i}" for i in range(100)])
    data = {"train": [{"kind": "labelled", "path": labelled}], "objective": "classification"}
    recipe.write_text(json.dumps({"data": data}))
    assert "pairs of texts" in complaint("ladder", str(recipe), "--out", str(out))
