"""Spec trees survive edits, records and misspellings."""

import json
import string
from dataclasses import MISSING, fields, replace
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regard.aliases import current_field
from regard.catalogue import PARTS, SLOTS, edited, from_record
from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.norm import LayerNorm, Norm
from regard.nn.residual import PreNorm, Residual
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.plain import Plain
from regard.presets import PRESETS
from regard.tree import Spec, diff, edit, get_at, hints, leaves, replace_at, swap, to_record


def _small() -> list[Spec]:
    """An instance of every part that needs nothing."""
    small_parts = [
        part
        for part in PARTS.values()
        if all(f.default is not MISSING or f.default_factory is not MISSING for f in fields(part))  # type: ignore[reportArgumentType]
    ]
    return [part() for part in small_parts if not issubclass(part, ModelSpec)]


SMALL = _small()


def paths(tree: ModelSpec) -> list[str]:
    """Every path to a plain value."""
    return [path for path, _ in leaves(tree) if not path.endswith(("kind", "]"))]


def annotation_at(tree: ModelSpec, path: str) -> Any:
    """The annotation of the field at `path`."""
    parent, _, name = path.rpartition(".")
    return hints(type(get_at(tree, parent) if parent else tree))[name]


# Constructed here and not while drawing, because the type checks of tests draw random numbers.
MODELS = [make() for _, make in sorted(PRESETS.items())]
FIELDS = [(tree, path, annotation_at(tree, path)) for tree in MODELS for path in paths(tree)]
models = st.sampled_from(MODELS)


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that fit an annotation. The part may reject them."""
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(1, 64)
    if annotation is float:
        return st.floats(0.0, 0.9).map(lambda x: round(x, 3))
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        fitting = [part for part in SMALL if isinstance(part, annotation)]
        return st.sampled_from(fitting) if fitting else st.nothing()
    if annotation is type(None):
        return st.none()
    options = get_args(annotation)
    return st.one_of(*(values(option) for option in options)) if options and Ellipsis not in options else st.nothing()


@st.composite
def edits(draw: st.DrawFn) -> tuple[ModelSpec, str, Any]:
    """(a model, a path in it, a value of the right type for that field)."""
    tree, path, annotation = draw(st.sampled_from(FIELDS))
    return tree, path, draw(values(annotation))


@settings(max_examples=60)
@given(edits())
def test_edited_trees_round_trip_through_json(case: tuple[ModelSpec, str, Any]) -> None:
    before, path, value = case
    try:
        after = edited(before, {path: value})
    except SpecError:  # the right type, and yet no value for this part
        assume(False)
        raise
    record = json.loads(json.dumps(to_record(after)))
    assert from_record(ModelSpec, record) == after
    assert to_record(from_record(record)) == record
    changed = diff(before, after)
    assert [where for where, _, _ in changed] == ([] if before == after else [path])
    assert edit(before, {where: value for where, _, value in changed}) == after


@settings(max_examples=60)
@given(models, st.data())
def test_replacing_a_field_by_its_value_changes_nothing(tree: ModelSpec, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths(tree)))
    assert replace_at(tree, path, get_at(tree, path)) == tree


@settings(max_examples=60)
@given(models, st.sampled_from([slot for slot in SLOTS if slot is not ModelSpec]))
def test_identity_swap_returns_the_same_tree(tree: ModelSpec, slot: type[Spec]) -> None:
    assert swap(tree, slot, lambda part: part) is tree


@settings(max_examples=40)
@given(models, st.sampled_from(sorted(part.kind for part in SLOTS[Norm])))
def test_swap_replaces_every_part_of_a_kind(tree: ModelSpec, kind: str) -> None:
    new = from_record(Norm, {"kind": kind})
    swapped = swap(tree, Norm, lambda _: new)
    norms: list[Norm] = []
    swap(swapped, Norm, lambda norm: norms.append(norm) or norm)
    assert norms
    assert set(norms) == {new}
    assert swap(swapped, Norm, lambda norm: norm) is swapped


def test_swaps_of_different_slots_commute() -> None:
    def norm(tree: ModelSpec) -> ModelSpec:
        return swap(tree, LayerNorm, lambda _: RMSNorm())

    def rule(tree: ModelSpec) -> ModelSpec:
        return swap(tree, Residual, lambda r: PreNorm(r.norm))  # type: ignore[reportAttributeAccessIssue]

    def width(tree: ModelSpec) -> ModelSpec:
        return swap(tree, FeedForward, lambda f: replace(f, gated=True))

    for make in PRESETS.values():
        assert norm(rule(width(make()))) == width(rule(norm(make())))


KEYS = sorted(
    {
        (part.kind, name)
        for part in (FeedForward, SelfAttention, Plain, LayerNorm)
        for name in hints(part)
        if len(name) > 4
    }
)


@st.composite
def misspelt(draw: st.DrawFn, name: str) -> str:
    """`name` with one letter dropped, doubled, changed, or two neighbours exchanged."""
    at = draw(st.integers(0, len(name) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase))
    changed = draw(
        st.sampled_from(
            [
                name[:at] + name[at + 1 :],
                name[:at] + name[at] + name[at:],
                name[:at] + letter + name[at + 1 :],
                name[:at] + name[at + 1 : at + 2] + name[at : at + 1] + name[at + 2 :],
            ]
        )
    )
    assume(changed != name)
    return changed


@settings(max_examples=150)
@given(st.data())
def test_misspelt_key_gets_a_suggestion(data: st.DataObject) -> None:
    kind, name = data.draw(st.sampled_from(KEYS))
    wrong = data.draw(misspelt(name))
    fields = hints(PARTS[kind])
    assume(wrong not in fields and current_field(kind, wrong) == wrong)
    # "position" and "positions" are two fields of a stack, and may be equally near.
    assume(not any(field != name and field.startswith(name[:-1]) for field in fields))
    with pytest.raises(SpecError) as raised:
        from_record({"kind": kind, wrong: None})
    assert raised.value.path == wrong
    assert f"unknown key {wrong!r} in {kind!r}; did you mean {name!r}?" in str(raised.value)


@settings(max_examples=100)
@given(st.data())
def test_misspelt_kind_gets_a_suggestion(data: st.DataObject) -> None:
    slot = data.draw(st.sampled_from([Norm, Residual]))
    kind = data.draw(st.sampled_from(sorted(part.kind for part in SLOTS[slot])))
    wrong = data.draw(misspelt(kind))
    assume(wrong not in PARTS)
    with pytest.raises(SpecError) as raised:
        from_record(slot, {"kind": wrong})
    assert raised.value.path == "kind"
    assert f"unknown kind {wrong!r}; did you mean {kind!r}?" in str(raised.value)
