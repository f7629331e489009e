"""docs/results/bytes.py: the split of the reviews, models of equal size, and the page from saved results."""

import gzip
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.bench.long_models import select
from regard.data.text import Labelled
from regard.recipe.recipe import request_from_record

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("bytes_script", ROOT / "docs" / "results" / "bytes.py")
assert SPEC is not None
assert SPEC.loader is not None
script: Any = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = script  # its dataclasses look up their module
SPEC.loader.exec_module(script)


def corpus() -> list[Any]:
    """Return as many reviews as the data set has, each with its own text but one."""
    rows = [script.Review(label, n, f"{label} {n}") for label in ("neg", "pos") for n in range(12_500)]
    rows[0] = rows[0]._replace(text="pos 10000")  # a text of the validation part
    return rows


def test_split_leaves_out_reviews_near_the_validation_part_and_equal_texts() -> None:
    train, valid = script.split(corpus())
    numbers = {label: [review.number for review in valid if review.label == label] for label in ("pos", "neg")}
    assert numbers == {"pos": list(range(10_000, 12_500)), "neg": list(range(3_050, 5_550))}
    kept = {label: {review.number for review in train if review.label == label} for label in ("pos", "neg")}
    assert kept["pos"] == set(range(9_970))
    assert kept["neg"] == {*range(1, 3_020), *range(5_580, 12_500)}
    assert len(valid) == len(corpus()) / 5


def test_split_is_written_as_files_that_regard_reads(tmp_path: Path) -> None:
    (tmp_path / "imdb").mkdir()
    with gzip.open(tmp_path / "imdb" / "train.tsv.gz", "wt", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{review.label}\t{review.number}\t7\t{review.text} é\x85\n" for review in corpus())
    facts = script.write_split(tmp_path, tmp_path / "out", replace(script.QUICK, length=9))
    records = list(Labelled(str(tmp_path / "out" / "valid.tsv")).records())
    assert records[0] == ("neg", "neg 3050 é\x85")
    assert len(records) == facts["valid"]["reviews"] == 250
    assert facts["valid"]["positive"] == 125
    assert facts["valid"]["truncated"] == facts["valid"]["reviews"]
    assert facts == script.write_split(tmp_path, tmp_path / "again", replace(script.QUICK, length=9))


def test_models_have_equally_many_parameters_and_valid_recipes() -> None:
    full = script._parameters(script.classifier(select(["full"])[0], script.WORK))
    facts = {"train": {"sha256": "a"}, "valid": {"sha256": "b"}}
    listed = script.jobs(script.MODELS, script.WORK, 2, facts, Path("out"))
    assert [job.seed for job in listed] == [1] * 7 + [2] * 7
    assert len({job.folder for job in listed}) == 14
    for job in listed[:7]:
        model = script.classifier(select([job.name])[0], script.WORK)
        assert script._parameters(model) == pytest.approx(full, rel=0.002)
        data = job.recipe["data"] | {"train": [{"kind": "labelled", "path": "train.tsv"}]}
        request = request_from_record(job.recipe | {"data": data})
        assert request.model is not None
        assert (request.data.max_len, request.train.choose, request.train.seed) == (4000, "last", 1)


def test_a_started_run_is_resumed(tmp_path: Path) -> None:
    facts = {"train": {"sha256": "a"}, "valid": {"sha256": "b"}}
    (job,) = script.jobs(["window"], script.QUICK, 1, facts, tmp_path)
    started = job.command(tmp_path, "cpu", None)
    assert started[4:6] == ["train", str(job.folder / "recipe.json")]
    assert "--max-time" not in started
    job.run.mkdir(parents=True)
    (job.run / "request.json").write_text("{}")
    continued = job.command(tmp_path, "cpu", 12.4)
    assert continued[4:6] == ["resume", str(job.run)]
    assert continued[-3:-1] == ["--max-time", "12s"]
    assert job.outcome() is None


def test_a_stopped_run_has_the_result_of_its_last_validation(tmp_path: Path) -> None:
    facts = {"train": {"sha256": "a"}, "valid": {"sha256": "b"}}
    (job,) = script.jobs(["window"], script.QUICK, 1, facts, tmp_path)
    job.run.mkdir(parents=True)
    valid = {"event": "valid", "step": 75, "accuracy": 60.0, "loss": 0.66, "time": 3.0}
    step = {"event": "step", "step": 90, "loss": 0.65, "time": 4.0}
    end = {"event": "end", "step": 90, "time": 4.0, "finished": False}
    (job.run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (valid, step, end)))
    (job.run / "environment.json").write_text('{"device": "cpu", "packages": {"torch": "2.11.0"}}')
    (job.run / "baselines.json").write_text('{"baselines": []}')
    result = job.outcome()
    assert not job.finished
    assert result is not None
    assert (result["step"], result["accuracy"], result["training_loss"]) == (75, 60.0, 0.65)


def run_of(name: str, seed: int, accuracy: float) -> dict[str, Any]:
    return {
        "name": name,
        "seed": seed,
        "parameters": 3_226_370,
        "step": 3000,
        "accuracy": accuracy,
        "loss": 0.61,
        "training_loss": 0.6,
        "seconds": 61.0,
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "baselines": {"bag of words": 86.5},
    }


def test_page_is_written_from_saved_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"reviews": 5_000, "positive": 2_500, "bytes": 10, "truncated": 143, "sha256": "a"}
    split = {"reviews": 25_000, "train": part | {"reviews": 19_889, "bytes": 25_728_857}, "valid": part}
    models = [{"name": model.name, "title": model.title} for model in select(list(script.MODELS))]
    runs = [run_of("full", 1, 64.0), run_of("full", 2, 65.0), run_of("linformer", 1, 55.0)]
    last = {"work": script.asdict(script.WORK), "split": split, "models": models}
    script.write([*runs, last], tmp_path)
    page = (tmp_path / "bytes.md").read_text()
    assert "| full attention | 3,226,370 | 3,000 | 64.5 ± 0.7 | 0.610 ± 0.000 | 0.600 ± 0.000 | 61 | 64.27 |" in page
    assert "| Linformer, encoder | 3,226,370 | 3,000 | 55.0 | 0.610 | 0.600 | 61 | 53.94 |" in page
    assert "| BigBird, encoder | not run yet |  |  |  |  |  | 64.02 |" in page
    assert "pos 10,000 to 12,499 and neg 3,050 to 5,549" in page
    assert "19,889 reviews" in page
    assert "the first 4,000 bytes of a review" in page
    assert "On NVIDIA H200, torch 2.11.0." in page
    (tmp_path / "bytes.md").unlink()
    monkeypatch.setattr(sys, "argv", ["bytes.py", "--page", "--write", str(tmp_path)])
    script.main()
    assert (tmp_path / "bytes.md").read_text() == page
    assert json.loads((tmp_path / "bytes.jsonl").read_text().splitlines()[-1])["split"] == split
