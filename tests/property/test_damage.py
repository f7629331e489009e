"""Files that a user can edit: if one node of the JSON is damaged, only regard's own errors are raised."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.prepare import Survey
from regard.data.tokenizer import BPE, Imported, Tokenizer, Words, train
from regard.errors import RegardError
from regard.presets import preset
from regard.recipe.recipe import Recipe, RecipeRequest, load_model, request_from_record
from regard.runs.request import request_from_options

TEXT = ["the cat sat on the mat"] * 5


def nested(levels: int) -> Any:
    value: Any = "bpe"
    for level in range(levels):
        value = [value] if level % 2 else {"kind": value}
    return value


VALUES = (
    None, True, -1, 0, 3, 2**62, 10**30, 10**400, 1e308, float("nan"), float("inf"), "", "x", "transformer_tiny",
    "\ud800", [], {}, [1], ["x"], {"kind": "x"}, {"kind": "bpe"}, {"a": {"b": 1}}, nested(50), nested(300),
)  # fmt: skip


@cache
def recipe_file() -> dict[str, Any]:
    return {
        "data": {
            "train": [{"kind": "tsv", "path": "a.tsv"}],
            "valid": [{"kind": "tsv", "path": "b.tsv"}],
            "tokenizer": {"kind": "bpe", "vocab": 800},
            "batching": {"kind": "buckets", "tokens": 1000},
            "objective": {"kind": "translation"},
        },
        "model": {"preset": "transformer_tiny", "variants": ["rotary"], "dropout": 0.0, "encoder": {"depth": 2}},
        "train": {"steps": 10, "optimizer": {"kind": "adamw", "learning_rate": 1e-3}, "schedule": {"kind": "linear"}},
        "decode": {"kind": "beam", "beam_size": 3},
    }


@cache
def asked_record() -> dict[str, Any]:
    return request_from_record(recipe_file()).record()


@cache
def recipe_record() -> dict[str, Any]:
    request = request_from_record(recipe_file())
    return Recipe(preset("transformer_tiny"), request.data, request.train, request.decode).record()


@cache
def tokenizer() -> dict[str, Any]:
    return json.loads(train(BPE(), TEXT).to_json())


@cache
def words() -> dict[str, Any]:
    return json.loads(train(Words(), TEXT).to_json())


@cache
def survey() -> dict[str, Any]:
    return json.loads(json.dumps(Survey(words={"source": 3}, ids={"target": 4}).__dict__))


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from nodes(each, (*path, key))


@st.composite
def damaged(draw: st.DrawFn, whole: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A document in which one node is removed or changed, or an unknown node is added."""
    document = copy.deepcopy(whole())
    *way, last = draw(st.sampled_from(list(nodes(document))))
    at: Any = document
    for step in way:
        at = at[step]
    how = draw(st.sampled_from(["delete", "replace", "replace", "add"]))
    if how == "delete":
        del at[last]
    elif how == "add" and isinstance(at, dict):
        at[draw(st.sampled_from(["x", "kind", "vocab", "regard"]))] = draw(st.sampled_from(VALUES))
    else:
        at[last] = draw(st.sampled_from(VALUES))
    return document


def of_file(read: Callable[[str], object]) -> Callable[[dict[str, Any], Path], None]:
    """Read a document from a file."""

    def attempt(document: dict[str, Any], path: Path) -> None:
        path.write_text(json.dumps(document))
        read(str(path))

    return attempt


READERS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any], Path], object]]] = {
    "recipe.json": (recipe_record, lambda document, _: Recipe.of(document)),
    "request.json": (asked_record, lambda document, _: RecipeRequest.of(document)),
    "recipe to train": (recipe_file, of_file(lambda path: request_from_options(recipe=path))),
    "recipe to show": (recipe_file, of_file(load_model)),
    "tokenizer.json": (tokenizer, lambda document, _: Tokenizer.from_json(json.dumps(document))),
    "words": (words, lambda document, _: Tokenizer.from_json(json.dumps(document))),
    "imported": (tokenizer, of_file(lambda path: train(Imported(path), []))),
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_raise_a_regard_error(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole, read = READERS[name]
    path = tmp_path_factory.mktemp("damage") / "document.json"
    read(whole(), path)

    @settings(max_examples=40)
    @given(damaged(whole))
    def check(document: dict[str, Any]) -> None:
        with suppress(RegardError):
            read(document, path)

    check()


@settings(max_examples=40)
@given(damaged(survey))
def test_damaged_survey_is_refused(document: dict[str, Any]) -> None:
    with suppress(KeyError, TypeError, ValueError, AttributeError):  # which `opened` makes a sentence of
        parsed = Survey.of(document)
        assert all(isinstance(count, int) for count in (*parsed.words.values(), *parsed.ids.values(), parsed.bytes))
