"""The cache: a second run reads its data from the cache, and `regard cache` lists and clears it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from .conftest import complaint, regard, training

FEW = ("--set", "train.steps=2", "--set", "train.decode=0")
TAKEN = "This text was prepared before: taking the data from the cache (regard cache)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("REGARD_CACHE_SIZE")
    return tmp_path / "cache"


def weights(run: Path) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in load_file(run / "weights-final.safetensors").items()}


def test_a_second_run_reads_its_data_from_the_cache(corpus: dict[str, str], tmp_path: Path, folder: Path) -> None:
    results = [regard(*training(corpus, tmp_path / f"run{n}", *FEW)) for n in range(2)]
    assert [run.returncode for run in results] == [0, 0], results[1].stderr
    assert [TAKEN in run.stdout + run.stderr for run in results] == [False, True]
    assert weights(tmp_path / "run0") == weights(tmp_path / "run1")

    cache = json.loads(regard("cache", "--json").stdout)
    assert (cache["folder"], len(cache["entries"]), cache["removed"]) == (str(folder), 1, 0)
    assert cache["entries"][0]["files"] == ["train.en", "train.de"]
    assert cache["size"] == cache["entries"][0]["size"] > 0
    assert "1 text," in regard("cache").stdout
    assert "train.en, train.de" in regard("cache").stdout

    cleared = regard("cache", "--clear").stdout
    assert cleared.startswith("removed 1 text,")
    assert "0 texts, 0.0 MB, at most 20 GB" in cleared
    again = regard(*training(corpus, tmp_path / "run2", *FEW, "--no-cache"))
    assert TAKEN not in again.stdout + again.stderr
    assert json.loads(regard("cache", "--json").stdout)["entries"] == []
    assert weights(tmp_path / "run2") == weights(tmp_path / "run0")


def test_resume_does_not_read_the_cache(corpus: dict[str, str], tmp_path: Path, folder: Path) -> None:
    assert regard(*training(corpus, tmp_path / "run", *FEW)).returncode == 0
    for path in (tmp_path / "run").glob("recipe.json"):  # as if killed before the recipe was chosen
        path.unlink()
    (tmp_path / "run" / "weights-final.safetensors").unlink()
    for path in (tmp_path / "run").glob("*-0000*"):
        path.unlink()
    result = regard("resume", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    assert TAKEN not in result.stdout + result.stderr
    assert "Reading the text" in result.stdout + result.stderr


def test_an_invalid_cache_size_is_refused(
    corpus: dict[str, str], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGARD_CACHE_SIZE", "much")
    assert "REGARD_CACHE_SIZE: 'much' is not a size" in complaint("cache")
    assert "REGARD_CACHE_SIZE: 'much' is not a size" in complaint(*training(corpus, tmp_path / "run", "-q"))
    assert not (tmp_path / "run").exists()


def test_the_help_names_the_folder_and_the_options() -> None:
    text = " ".join(regard("cache", "--help").stdout.split())
    assert all(word in text for word in ("REGARD_CACHE sets", "XDG_CACHE_HOME", "REGARD_CACHE_SIZE", "--clear"))
    assert "--no-cache" in regard("train", "--help").stdout
