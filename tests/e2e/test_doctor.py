"""The command `doctor` on text and on training runs."""

import json
import os
from pathlib import Path

import pytest

from regard.doctor.degenerate import TRAININGS, Degenerate, examined, named
from regard.doctor.sentences import sentences

from .conftest import complaint, regard, write

ENGLISH, GERMAN, _ = (list(column) for column in zip(*sentences(600, 8), strict=True))
SEEDS = int(os.environ.get("REGARD_DOCTOR_SEEDS", "0"))  # `make test-doctor` sets it


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {"en": write(tmp_path / "train.en", ENGLISH), "de": write(tmp_path / "train.de", GERMAN)}


def words(files: dict[str, str], *more: str) -> tuple[str, ...]:
    return ("doctor", "--source", files["en"], "--target", files["de"], *more)


def test_healthy_text_gives_exit_code_0_and_lines_of_80_columns(files: dict[str, str], tmp_path: Path) -> None:
    small = [
        word for change in ("d_model=16", "encoder.depth=1", "decoder.depth=1") for word in ("--set", f"model.{change}")
    ]
    page = tmp_path / "doctor.html"
    result = regard(*words(files, "--preset", "transformer_tiny", "--steps", "5", *small, "--page", str(page)))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "healthy: no errors or warnings" in result.stdout
    assert "a step on the worst batch fits" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if str(tmp_path) not in line) <= 80
    assert "The planned training" in page.read_text()


def test_faulty_text_gives_exit_code_1_and_a_json_report(files: dict[str, str]) -> None:
    write(Path(files["de"]), GERMAN[:200] + GERMAN[201:])
    result = regard(*words(files, "--json"))
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["errors"] == 1
    assert report["findings"][0]["check"] == "alignment"
    assert abs(report["findings"][0]["lines"][0] - 201) <= 12
    assert report["skipped"] == [
        {"check": "length ratios", "why": "the findings of alignment come first"},
        {"check": "memory", "why": "first correct the errors of alignment"},
    ]


def test_a_run_is_examined_with_its_outputs(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "doctor.html"
    result = regard("doctor", str(run), "--page", str(page), "--device", "cpu")
    assert result.returncode == 0, result.stdout
    assert "nothing found by:" in result.stdout
    assert "Example outputs" in page.read_text()
    assert "<svg" in page.read_text()


def test_a_run_without_its_text_and_outputs_is_still_examined(run: Path, corpus: dict[str, str]) -> None:
    hidden = Path(corpus["source"]).rename(corpus["source"] + ".hidden")
    try:
        result = regard("doctor", str(run), "--examples", "0", "--json")
    finally:
        hidden.rename(corpus["source"])
    report = json.loads(result.stdout)
    assert result.returncode == 0
    assert [each["check"] for each in report["skipped"]] == ["outputs", "training text"]


def test_bad_options_are_refused_in_one_sentence(files: dict[str, str], run: Path, tmp_path: Path) -> None:
    assert "nothing to examine" in complaint("doctor")
    assert "--source: has no effect" in complaint("doctor", str(run), "--source", files["en"])
    assert "--no-probe" in complaint("doctor", str(run), "--no-probe")
    assert "--examples" in complaint(*words(files, "--examples", "3"))
    assert "no such file" in complaint("doctor", "--tsv", str(tmp_path / "none"))
    assert "does not exist" in complaint("doctor", str(tmp_path / "none"))
    assert "did you mean" in complaint(*words(files, "--set", "train.step=3"))
    assert "cannot be written" in complaint(*words(files, "--no-probe", "--page", str(tmp_path / "no" / "x.html")))


@pytest.mark.skipif(not SEEDS, reason="takes a minute for every seed: make test-doctor")
@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
def test_the_cause_of_a_degenerate_training_is_named_first(training: Degenerate, seed: int, tmp_path: Path) -> None:
    report = examined(training, tmp_path / "training", seed)
    assert named(training, report), report.record()["findings"]
