"""A user-defined variant, written outside the package: in an ablation and in training."""

import json

import pytest

from regard.errors import SpecError
from regard.presets import preset
from regard.variants import apply

from .command import SMALL, User

MY_VARIANTS = '''
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


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    return User.of(tmp_path_factory.mktemp("user"), "my_variants", MY_VARIANTS)


@pytest.mark.slow
def test_user_variant_is_a_row_of_an_ablation(user: User) -> None:
    words = ("ablate", "--tsv", "pairs.tsv", *SMALL, "--steps", "8", "--seeds", "1", "--jobs", "1", "--json")
    result = user.run(*words, "--rows", "my_variants:cosine,swiglu", "--trust-code", "--out", "ablation")
    rows = {row["name"]: row for row in json.loads(result.out)["rows"]}
    assert list(rows) == ["base", "my_variants:cosine", "swiglu"]
    assert rows["my_variants:cosine"]["about"].startswith("Cosine attention")
    assert rows["my_variants:cosine"]["parameters"] == rows["base"]["parameters"] + 4  # two scales in both layers
    assert rows["my_variants:cosine"]["final"] is not None


@pytest.mark.slow
def test_run_with_a_user_variant_loads_only_with_trust_code(user: User) -> None:
    user.train("run", 4, "--variant", "my_variants:cosine", "--quiet")
    assert '"my_variants:Unit"' in (user.folder / "run" / "recipe.json").read_text()
    (user.folder / "in.txt").write_text("one house\n")
    user.run("translate", "run", "in.txt", "--trust-code")
    assert "--trust-code" in user.refusal("translate", "run", "in.txt")


def test_code_is_not_imported_without_trust_code(user: User) -> None:
    (user.folder / "trap.py").write_text("open('imported', 'w')\ndef cosine(model): return model\n")
    ablate = ("ablate", "--tsv", "pairs.tsv", "--rows", "trap:cosine", "--out", "none")
    assert "--rows: 'trap:cosine' would import code; add --trust-code" in user.refusal(*ablate)
    train = ("train", "--tsv", "pairs.tsv", "--preset", "transformer_tiny", "--variant", "trap:cosine", "--out", "none")
    assert "'trap:cosine' would import code; add --trust-code" in user.refusal(*train)
    assert not (user.folder / "imported").exists()
    assert not (user.folder / "none").exists()


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("my_variants:cosin", "has no 'cosin'; did you mean 'cosine'?"),
        ("nowhere:cosine", "cannot import 'nowhere'"),
        ("my_variants:wide", "is not a function"),
        ("my_variants:broken", "failed with AttributeError"),
        ("my_variants:same", "changes nothing here"),
    ],
)
def test_failing_user_variant_is_refused_in_one_sentence(
    user: User, row: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(user.folder))
    with pytest.raises(SpecError) as error:
        apply(row, preset("transformer_tiny"), trust_code=True)
    assert sentence in str(error.value)


def test_variants_lists_the_changes_of_a_user_variant(user: User) -> None:
    result = user.run("variants", "my_variants:cosine", "--trust-code", "--base", "transformer_tiny", "--json")
    (row,) = json.loads(result.out)["variants"]
    assert row["group"] == "own"
    assert any("query_key_norm" in change["path"] for change in row["changes"])
