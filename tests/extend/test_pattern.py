"""Attention patterns that differ between layers, one of them defined outside the package."""

import json
from typing import Any

import pytest

import regard
from regard.nn.branches.self_attention import SelfAttention, SelfAttentionModule
from regard.nn.pattern import Window
from regard.recipe.recipe import load_model
from regard.testing import examine, tiny
from regard.tree import replace_at, walk

from .command import User

EVERY_OTHER = '''
from dataclasses import dataclass

from regard.nn.pattern import AttentionPattern


@dataclass(frozen=True, slots=True)
class EveryOther(AttentionPattern):
    """Attend to keys at an even distance, including the query itself."""

    kind = "every_other"
    may_hide_all = False

    def visible(self, q, k):
        return (q - k) % 2 == 0
'''
RECIPE = """
[data]
train = [{ kind = "tsv", path = "pairs.tsv" }]
tokenizer = "bytes"
held_out = 8
batching = { kind = "buckets", tokens = 300 }

[model]
preset = "transformer_tiny"
d_model = 16
decoder.depth = 3
[[model.decoder.pattern]]  # two local layers, then a global one
kind = "block"
branches = [{ kind = "self_attention", attention_pattern = "every_other:EveryOther" }, "cross_attention", "feedforward"]
[[model.decoder.pattern]]
kind = "block"
branches = [{ kind = "self_attention", attention_pattern = "every_other:EveryOther" }, "cross_attention", "feedforward"]
[[model.decoder.pattern]]
kind = "block"
branches = ["self_attention", "cross_attention", "feedforward"]

[train]
steps = 6
validate_every = 6
decode = 2
"""
LOCAL = '{kind="block", branches=[{kind="self_attention", attention_pattern={kind="window", size=8}}, "feedforward"]}'
GLOBAL = '{kind="block", branches=["self_attention", "feedforward"]}'


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    user = User.of(tmp_path_factory.mktemp("pattern"), "every_other", EVERY_OTHER)
    (user.folder / "recipe.toml").write_text(RECIPE)
    return user


def patterns(spec: Any) -> list[Any]:
    """The attention pattern of every block of a stack."""
    return [part.attention_pattern for part in walk(spec) if isinstance(part, SelfAttention)]


@pytest.mark.slow
def test_layers_with_a_user_pattern_train_and_translate(user: User) -> None:
    words = ("train", "recipe.toml", "--out", "run", "--json")
    assert "'every_other:EveryOther' would import code; add --trust-code" in user.refusal(*words)
    user.run(*words, "--trust-code")
    blocks = json.loads((user.folder / "run" / "recipe.json").read_text())["model"]["decoder"]["pattern"]
    other = {"kind": "every_other:EveryOther"}
    assert [block["branches"][0]["attention_pattern"] for block in blocks] == [other, other, None]
    (user.folder / "in.txt").write_text("one house\n")
    user.run("translate", "run", "in.txt", "--trust-code")
    assert "--trust-code" in user.refusal("translate", "run", "in.txt")


def test_one_edit_alternates_local_and_global_layers() -> None:
    spec, edited = load_model("transformer_tiny", ["encoder.depth=6", f"encoder.pattern=[{LOCAL}, {LOCAL}, {GLOBAL}]"])
    assert patterns(spec.encoder) == [None]  # type: ignore[reportAttributeAccessIssue]
    assert patterns(edited.encoder) == [Window(8), Window(8), None]  # type: ignore[reportAttributeAccessIssue]
    built = regard.build(edited)
    assert [m.attention_pattern for m in built.modules() if isinstance(m, SelfAttentionModule)][:6] == [
        Window(8),
        Window(8),
        None,
        Window(8),
        Window(8),
        None,
    ]


def test_user_pattern_in_some_layers_keeps_the_laws(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(user.folder))
    spec = tiny.decoder_only(depth=3)
    local = {"kind": "self_attention", "attention_pattern": "every_other:EveryOther"}
    blocks = [{"kind": "block", "branches": [first, "feedforward"]} for first in (local, local, "self_attention")]
    spec = regard.catalogue.edited(spec, {"decoder.pattern": blocks}, trust_code=True)
    assert [pattern is not None for pattern in patterns(spec)] == [True, True, False]
    assert regard.from_record(regard.to_record(spec), trust_code=True) == spec
    laws = ("causality", "padding", "packing", "steps", "ragged", "beams", "batch", "inspection", "kernels", "fast")
    assert {v.law: v.detail for v in examine("layers", spec, laws) if v.outcome != "kept"} == {}
    everywhere = replace_at(tiny.decoder_only(depth=3), "decoder.attention_pattern", patterns(spec)[0])
    assert {v.law: v.detail for v in examine("stack", everywhere, laws) if v.outcome != "kept"} == {}
