"""A user's own variant, written outside the package: a row of an ablation and a variant of a training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.errors import SpecError
from regard.presets import preset
from regard.variants import apply

MINE = '''
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.base import ModelSpec
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.core import Site
from regard.nn.norm import Norm
from regard.tree import swap


@dataclass(frozen=True, slots=True)
class Unit(Norm):
    """x / |x| times a learned scale."""

    kind = "unit"

    def build(self, site: Site, width: int | None = None) -> nn.Module:
        return UnitModule()


class UnitModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.normalize(x, dim=-1)


def cosine(model: ModelSpec) -> ModelSpec:
    """Cosine attention: queries and keys of unit length, with a learned temperature."""
    return swap(model, SelfAttention, lambda part: replace(part, query_key_norm=Unit(), scale="none"))


def broken(model: ModelSpec) -> ModelSpec:
    return model.no_such_field


def same(model: ModelSpec) -> ModelSpec:
    return model


wide = 3
'''
SMALL = (
    "--set", "model.d_model=16", "--set", "model.encoder.depth=1", "--set", "model.decoder.depth=1",
    "--set", "data.tokenizer=bytes", "--set", "data.batching.tokens=200", "--set", "data.held_out=20",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with mine.py and a corpus."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(MINE)
    pairs = [f"{a} {b}\t{b} {a}" for a in ("one", "two", "red", "big", "old") for b in ("house", "dog", "cat", "sun")]
    (folder / "pairs.tsv").write_text("\n".join(pairs * 8) + "\n")
    return folder


def regard(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, in the folder of the user's own module."""
    command = [sys.executable, "-P", "-m", "regard", *words]
    environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)


def refusal(folder: Path, *words: str) -> str:
    result = regard(folder, *words)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.slow
def test_an_ablation_has_a_row_of_ones_own(folder: Path) -> None:
    words = ("ablate", "--tsv", "pairs.tsv", *SMALL, "--steps", "16", "--seeds", "1", "--jobs", "1", "--json")
    result = regard(folder, *words, "--rows", "mine:cosine,swiglu", "--trust-code", "--out", "ablation")
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == ["base", "mine:cosine", "swiglu"]
    assert rows["mine:cosine"]["about"].startswith("Cosine attention")
    assert rows["mine:cosine"]["parameters"] == rows["base"]["parameters"] + 4  # two scales in each of two layers
    assert rows["mine:cosine"]["final"] is not None


@pytest.mark.slow
def test_a_run_with_a_variant_of_ones_own_loads_only_if_its_code_is_trusted(folder: Path) -> None:
    words = ("train", "--tsv", "pairs.tsv", *SMALL, "--set", "train.steps=8", "--variant", "mine:cosine")
    result = regard(folder, *words, "--trust-code", "--out", "run", "--quiet")
    assert result.returncode == 0, result.stderr
    assert '"mine:Unit"' in (folder / "run" / "recipe.json").read_text()
    (folder / "in.txt").write_text("one house\n")
    assert regard(folder, "translate", "run", "in.txt", "--trust-code").returncode == 0
    assert "--trust-code" in refusal(folder, "translate", "run", "in.txt")


def test_code_is_not_imported_unless_it_is_trusted(folder: Path) -> None:
    (folder / "trap.py").write_text("open('imported', 'w')\ndef cosine(model): return model\n")
    ablate = ("ablate", "--tsv", "pairs.tsv", "--rows", "trap:cosine", "--out", "none")
    assert "--rows: 'trap:cosine' would import code; add --trust-code" in refusal(folder, *ablate)
    train = ("train", "--tsv", "pairs.tsv", "--preset", "transformer_tiny", "--variant", "trap:cosine", "--out", "none")
    assert "'trap:cosine' would import code; add --trust-code" in refusal(folder, *train)
    assert not (folder / "imported").exists()
    assert not (folder / "none").exists()


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("mine:cosin", "has no 'cosin'; did you mean 'cosine'?"),
        ("nowhere:cosine", "cannot import 'nowhere'"),
        ("mine:wide", "is no function"),
        ("mine:broken", "failed with AttributeError"),
        ("mine:same", "changes nothing here"),
    ],
)
def test_a_variant_of_ones_own_that_fails_is_one_sentence(
    folder: Path, row: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(SpecError) as refused:
        apply(row, preset("transformer_tiny"), trust_code=True)
    assert sentence in str(refused.value)


def test_variants_lists_the_changes_of_ones_own(folder: Path) -> None:
    result = regard(folder, "variants", "mine:cosine", "--trust-code", "--base", "transformer_tiny", "--json")
    (row,) = json.loads(result.stdout)["variants"]
    assert row["group"] == "own"
    assert any("query_key_norm" in change["path"] for change in row["changes"])
