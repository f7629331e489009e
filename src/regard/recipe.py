"""Recipes: a model (later also data, training and decoding) from a preset, a TOML or a JSON file, and --set edits."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.catalogue import PARTS, edited
from regard.errors import SpecError, nearest
from regard.models.base import ModelSpec
from regard.presets import PRESETS, preset
from regard.tree import read


def load_model(name: str, changes: Sequence[str] = (), trust_code: bool = False) -> tuple[ModelSpec, ModelSpec]:
    """The model of a preset or of a recipe file, and the base that it differs from.

    `changes` are `path=value` edits of the model; a leading `model.` is allowed, so that the same edit works on a whole
    recipe.
    """
    base, spec = _resolve(name, trust_code)
    edits = dict(parse_change(change) for change in changes)
    return base, edited(spec, edits, trust_code) if edits else spec


def _resolve(name: str, trust_code: bool) -> tuple[ModelSpec, ModelSpec]:
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        if name and name not in PRESETS and path.exists():
            raise SpecError("", f"{name} is no recipe; one ends in .toml or .json")
        spec = preset(name)
        return spec, spec
    record = read_file(path)
    unknown = [key for key in record if key != "model"]
    if unknown:
        raise SpecError(unknown[0], f"unknown key {unknown[0]!r} in {name}; {nearest(unknown[0], ['model'])}")
    if "model" not in record:
        raise SpecError("model", f'{name} has none; write model = {{ preset = "transformer_base" }}')
    return model_of(record["model"], "model", trust_code)


def model_of(record: Any, path: str, trust_code: bool = False) -> tuple[ModelSpec, ModelSpec]:
    """(base, model) of the `model` table: a preset with edits, or a complete record with a kind."""
    if isinstance(record, Mapping) and "preset" in record:
        changes = {key: value for key, value in record.items() if key != "preset"}
        name = record["preset"]
        if not isinstance(name, str):
            raise SpecError(f"{path}.preset", f"needs the name of a preset, not {name!r}")
        try:
            base = preset(name)
            return base, edited(base, _flat(changes), trust_code) if changes else base
        except SpecError as error:
            raise error.inside(path) from None
    spec = read(record, ModelSpec, path, PARTS, trust_code)
    return spec, spec


def _flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as paths: {"decoder": {"depth": 3}} -> {"decoder.depth": 3}. A table with a kind is a value."""
    flat: dict[str, Any] = {}
    for key, value in changes.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping) and value and "kind" not in value:
            flat |= _flat(value, path)
        else:
            flat[path] = value
    return flat


def read_file(path: Path) -> dict[str, Any]:
    """A TOML or JSON file as a table."""
    try:
        text = path.read_text(encoding="utf-8")
        record = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise SpecError("", f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise SpecError("", f"{path} is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(record, dict):
        raise SpecError("", f"{path} must hold a table, not a {type(record).__name__}")
    return record


def parse_change(change: str) -> tuple[str, Any]:
    """`path=value` as (path, value): numbers, booleans, lists and tables as in TOML, `none`, anything else a string."""
    path, equals, text = change.partition("=")
    path, text = path.strip().removeprefix("model."), text.strip()
    if not equals or not path or not text:
        raise SpecError("--set", f"{change!r} is not path=value, such as decoder.depth=3")
    if text in ("none", "null", "None"):
        return path, None
    try:
        return path, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return path, text
