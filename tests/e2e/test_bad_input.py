"""Bad input: one sentence that says what is wrong, where and what to do; exit code 2; nothing half-written."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from .conftest import complaint, regard, training, write


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "en": write(tmp_path / "en", [f"a b {i}" for i in range(100)]),
        "de": write(tmp_path / "de", [f"c d {i}" for i in range(100)]),
    }


def refused(files: dict[str, str], tmp_path: Path, *options: str) -> str:
    """Return the error message of a refused training, which leaves no files behind."""
    out = tmp_path / "run"
    message = complaint("train", "--source", files["en"], "--target", files["de"], "--out", str(out), *options)
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))
    return message


def test_files_of_unequal_length(files: dict[str, str], tmp_path: Path) -> None:
    write(Path(files["de"]), ["x"] * 99)
    message = refused(files, tmp_path)
    assert "100" in message
    assert "99" in message


def test_a_binary_file(files: dict[str, str], tmp_path: Path) -> None:
    Path(files["de"]).write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    assert "not text" in refused(files, tmp_path) or "UTF-8" in refused(files, tmp_path)


def test_not_utf8_names_the_line(files: dict[str, str], tmp_path: Path) -> None:
    Path(files["de"]).write_bytes(b"gut\n" * 40 + b"gr\xfcn\n" + b"gut\n" * 59)
    message = refused(files, tmp_path)
    assert "line 41" in message
    assert "UTF-8" in message


def test_an_empty_file(files: dict[str, str], tmp_path: Path) -> None:
    Path(files["de"]).write_text("")
    assert "empty" in refused(files, tmp_path)


def test_only_empty_lines(files: dict[str, str], tmp_path: Path) -> None:
    write(Path(files["de"]), [""] * 100)
    assert "no record" in refused(files, tmp_path)


def test_a_missing_file(files: dict[str, str], tmp_path: Path) -> None:
    Path(files["de"]).unlink()
    assert "no such file" in refused(files, tmp_path)


def test_a_vocabulary_larger_than_the_corpus_supports(files: dict[str, str], tmp_path: Path) -> None:
    assert "supports a vocabulary of at most" in refused(files, tmp_path, "--set", "data.tokenizer.vocab=30000")


def test_invalid_settings_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    assert "did you mean 'steps'" in refused(files, tmp_path, "--set", "train.step=3")
    assert "did you mean 'depth'" in refused(files, tmp_path, "--set", "model.decoder.dept=3")
    assert "unknown key 'decod'" in refused(files, tmp_path, "--set", "decod.beams=3")
    assert "data.tokenizer.vocab" in refused(files, tmp_path, "--set", "model.vocab=500")
    assert "did you mean 'rotary'" in refused(files, tmp_path, "--variant", "rotari")
    assert "transformer_tiny" in refused(files, tmp_path, "--preset", "transformer_tini")
    assert "cannot learn" in refused(files, tmp_path, "--preset", "gpt2_small")
    assert "at least 1" in refused(files, tmp_path, "--set", "train.steps=0")
    assert "beam_size" in refused(files, tmp_path, "--set", "decode.beam_size=0")
    assert "is less than the longest example" in refused(files, tmp_path, "--set", "data.batching.tokens=1")
    assert "not one of auto" in refused(files, tmp_path, "--device", "tpu")
    assert "is not a time" in refused(files, tmp_path, "--max-time", "soon")
    assert "CPU trains in float32" in refused(files, tmp_path, "--set", "train.precision=bfloat16", "--device", "cpu")


def test_half_a_pair_of_files_and_no_files_at_all(files: dict[str, str], tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    assert "--target" in complaint("train", "--source", files["en"], "--out", out)
    assert "no training text is given" in complaint("train", "--out", out)
    assert "--out" in complaint("train", "--source", files["en"], "--target", files["de"])
    options = (
        "--source",
        files["en"],
        "--target",
        files["de"],
        "--valid-source",
        files["en"],
        "--valid-target",
        files["de"],
    )
    assert "second validation text" in complaint("train", *options, "--valid", files["en"], "--out", out)
    assert "cannot be mixed" in complaint("train", "--text", files["en"], "--tsv", files["de"], "--out", out)


def test_a_target_identical_to_its_source_is_a_warning(files: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(files["en"], files["de"])
    result = regard(
        "train", "--source", files["en"], "--target", files["de"], "--out", str(tmp_path / "run"),
        "--set", "train.steps=1", "--set", "model.d_model=16", "--set", "train.decode=1",
    )  # fmt: skip
    assert result.returncode == 0
    assert "warning" in result.stderr
    assert "the target is the source" in result.stderr


def test_a_folder_that_exists_is_never_written_into(run: Path, corpus: dict[str, str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert "regard resume" in complaint(*training(corpus, run))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_runs_that_cannot_be_used(copy: Path, tmp_path: Path) -> None:
    assert "does not exist" in complaint("translate", str(tmp_path / "nowhere"), stdin=b"x\n")
    (tmp_path / "empty").mkdir()
    assert "is not a training run" in complaint("translate", str(tmp_path / "empty"), stdin=b"x\n")
    assert "is not a training run" in complaint("resume", str(tmp_path / "empty"))


def test_a_run_of_a_newer_format(copy: Path) -> None:
    record = json.loads((copy / "recipe.json").read_text())
    (copy / "recipe.json").write_text(json.dumps(record | {"format": 99}))
    assert "newer regard" in complaint("translate", str(copy), stdin=b"x\n")


def test_weights_that_are_damaged_or_of_another_model(copy: Path) -> None:
    weights = copy / "weights-final.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "damaged" in complaint("translate", str(copy), stdin=b"x\n")
    weights.write_bytes(b"\xff" * 100)
    assert "damaged" in complaint("translate", str(copy), stdin=b"x\n")
    weights.write_bytes(whole)
    record = json.loads((copy / "recipe.json").read_text())
    record["model"]["d_model"] = 96
    (copy / "recipe.json").write_text(json.dumps(record))
    assert "recipe.json has changed since training began" in complaint("translate", str(copy), stdin=b"x\n")
    (copy / "checksums.json").unlink()
    assert "do not fit" in complaint("translate", str(copy), stdin=b"x\n")


def test_a_recipe_that_names_code_is_not_run(copy: Path) -> None:
    record = json.loads((copy / "recipe.json").read_text())
    record["model"]["head"]["kind"] = "os:system"
    (copy / "recipe.json").write_text(json.dumps(record))
    assert "would import code" in complaint("translate", str(copy), stdin=b"x\n")
    record["model"]["head"]["kind"] = "regard.nn.vocab.softmax:Softmax"
    (copy / "recipe.json").write_text(json.dumps(record))
    (copy / "checksums.json").unlink()  # because the recipe was changed on purpose
    assert regard("translate", str(copy), "--trust-code", stdin=b"one\n").returncode == 0


def test_invalid_searches_are_refused(run: Path) -> None:
    def message(*words: str) -> str:
        return complaint("translate", str(run), *words, stdin=b"one\n")

    assert "is too small for 3 outputs" in message("--beam", "2", "--n-best", "3")
    assert "choose one" in message("--beam", "2", "--temperature", "0.5")
    assert "temperature" in message("--temperature", "-1")
    assert "alpha" in message("--set", "alpa=2")
    assert "streamed" in message("--stream")
    result = regard("translate", str(run), "--beam", "0", stdin=b"one\n")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_standard_input_that_is_not_text(run: Path) -> None:
    result = regard("translate", str(run), stdin=b"one\n\xff\n")
    assert result.returncode == 2
    assert result.stdout.count("\n") == 1  # of the line before it
    assert "line 2" in result.stderr


def test_a_truncated_gzip_file_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    with gzip.open(tmp_path / "de.gz", "wt") as file:
        file.write("x\n" * 100)
    (tmp_path / "de.gz").write_bytes((tmp_path / "de.gz").read_bytes()[:20])
    message = refused(files | {"de": str(tmp_path / "de.gz")}, tmp_path)
    assert "de.gz" in message
