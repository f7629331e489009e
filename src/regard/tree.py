"""Functions on trees of specs: edit fields by type or path, convert to and from JSON, compare.

A spec is a frozen dataclass that describes a part of a model or recipe. Its fields are numbers, strings, other specs,
or tuples of these. This module depends on no particular spec and does not import torch.
"""

import importlib
import math
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union

from regard.aliases import current_field, current_kind, current_value
from regard.errors import SpecError, join, nearest

S = TypeVar("S", bound="Spec")
N = TypeVar("N", bound="Spec")

Parts = Mapping[str, type["Spec"]]
Changes = list[tuple[list[str | int], Any]]  # pairs (steps of a path: field names and indices, new value)
MAX_DEPTH = 100  # levels of nested tables and lists: far more than any recipe has, far below Python's recursion limit


class Spec:
    """Base class of specs: a frozen description of a part of a model or recipe, named by its `kind` in JSON.

    Subclasses are `@dataclass(frozen=True, slots=True)`. The types of all fields are checked when a spec is
    constructed, in Python code or from JSON.
    """

    __slots__ = ()
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the value of every field against the type annotation of the field, then call `check`."""
        for name, annotation in hints(type(self)).items():
            value = getattr(self, name)
            fitted = fit(value, annotation, name)
            if fitted is not value:
                object.__setattr__(self, name, fitted)
        self.check()

    def check(self) -> None:
        """Raise `SpecError(field, message)` for invalid values. By default, all values are valid."""


@cache
def hints(spec: type[Spec]) -> dict[str, Any]:
    """Return the resolved type annotation of every field of a spec class, keyed by field name."""
    if not is_dataclass(spec):
        return {}
    resolved = typing.get_type_hints(spec)
    return {field.name: resolved[field.name] for field in fields(spec)}


def fit(value: Any, annotation: Any, path: str, parts: Parts | None = None, trust: bool = False) -> Any:
    """Convert a value to an annotated type; raise SpecError with `path` if that is impossible.

    If `parts` (kind -> spec class) is given, mappings and kinds are converted to specs, as in JSON. Otherwise, the only
    conversions are from int to float and from list to tuple.
    """
    origin, options = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin in (Union, UnionType):
        return _fit_union(value, options, path, parts, trust)
    if origin is Literal:
        if any(value == option and type(value) is type(option) for option in options):
            return value
        if value is None and "none" in options:  # the command line parses none as null
            return "none"
        hint = nearest(value, [o for o in options if isinstance(o, str)]) if isinstance(value, str) else "choose one"
        raise SpecError(path, f"{value!r} is not one of {', '.join(map(repr, options))}; {hint}")
    if origin is tuple:
        return _fit_tuple(value, options, path, parts, trust)
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        if isinstance(value, annotation):
            return value
        if parts is not None and isinstance(value, str | Mapping):
            return _read(value, annotation, path, parts, trust)
        raise SpecError(path, f"needs {_name(annotation)}, not {_describe(value)}; docs/catalogue.md lists all specs")
    return _fit_plain(value, annotation, path)


def _fit_plain(value: Any, annotation: Any, path: str) -> Any:
    if annotation in (NoneType, None):
        if value is None:
            return None
    elif annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer beyond the range of float
            number = math.inf
        if not math.isfinite(number):
            raise SpecError(path, f"needs a finite number, not {_describe(value)}")
        return number
    elif type(value) is annotation:
        return value
    raise SpecError(path, f"needs {_name(annotation)}, not {_describe(value)}")


def _fit_tuple(value: Any, options: tuple[Any, ...], path: str, parts: Parts | None, trust: bool) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise SpecError(path, f"needs a list, not {_describe(value)}")
    if len(options) == 2 and options[1] is Ellipsis:
        options = (options[0],) * len(value)
    if len(options) != len(value):
        raise SpecError(path, f"needs {len(options)} values, not {len(value)}")
    fitted = tuple(fit(v, o, f"{path}[{i}]", parts, trust) for i, (v, o) in enumerate(zip(value, options, strict=True)))
    if isinstance(value, tuple) and all(a is b for a, b in zip(fitted, value, strict=True)):
        return value
    return fitted


def _fit_union(value: Any, options: tuple[Any, ...], path: str, parts: Parts | None, trust: bool) -> Any:
    errors = []
    for option in options:
        try:
            return fit(value, option, path, parts, trust)
        except SpecError as error:
            errors.append((option, error))
    # An error inside the value, or about a name, is more precise than a list of the expected types.
    for option, error in errors:
        is_record = isinstance(value, Mapping) and isinstance(option, type) and issubclass(option, Spec)
        is_choice = isinstance(value, str) and typing.get_origin(option) is Literal
        if error.path != path or is_record or is_choice:
            raise error
    raise SpecError(path, f"needs {' or '.join(map(_name, options))}, not {_describe(value)}")


def _name(annotation: Any) -> str:
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    names[NoneType] = names[None] = "nothing (null)"
    if annotation in names:
        return names[annotation]
    if isinstance(annotation, type):
        return f"a spec of type {annotation.__name__}" if issubclass(annotation, Spec) else annotation.__name__
    if typing.get_origin(annotation) is Literal:
        return " or ".join(map(repr, typing.get_args(annotation)))
    return "a list" if typing.get_origin(annotation) is tuple else str(annotation)


def _describe(value: Any) -> str:
    if isinstance(value, Spec):
        return f"{type(value).__name__}()"
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def swap(tree: S, kind: type[N], to: Callable[[N], Any]) -> S:
    """Return a copy of the tree in which every spec of type `kind` is replaced by `to(spec)`, innermost specs first."""
    return _swapped(tree, kind, to, "")


def _swapped(node: Any, kind: type[Spec], to: Callable[[Any], Any], path: str) -> Any:
    if isinstance(node, tuple):
        swapped = tuple(_swapped(item, kind, to, f"{path}[{i}]") for i, item in enumerate(node))
        return node if all(a is b for a, b in zip(swapped, node, strict=True)) else swapped
    if not isinstance(node, Spec):
        return node
    changed = {}
    for name in hints(type(node)):
        value = getattr(node, name)
        new = _swapped(value, kind, to, join(path, name))
        if new is not value:
            changed[name] = new
    try:
        if changed:
            node = replace(node, **changed)  # type: ignore[type-var]  # every concrete spec is a dataclass
        return to(node) if isinstance(node, kind) else node
    except SpecError as error:
        raise error.inside(path) from None


def replace_at(tree: S, path: str, value: Any, parts: Parts | None = None) -> S:
    """Return a copy of `tree` with the field at `path`, such as `decoder.pattern[0].residual`, set to `value`."""
    return edit(tree, {path: value}, parts)


def edit(tree: S, changes: Mapping[str, Any], parts: Parts | None = None, trust: bool = False) -> S:
    """Return a copy of `tree` with `changes` (path -> value) applied.

    A spec is checked only after all of its changes are applied. Sizes that depend on each other can therefore be
    changed together.
    """
    steps = [(_steps(path), value) for path, value in changes.items()]
    return _edited(tree, Any, steps, "", lambda value, annotation, path: fit(value, annotation, path, parts, trust))


def get_at(tree: Spec, path: str) -> Any:
    """Return the value at `path`, such as `decoder.pattern[0].residual`."""
    node: Any = tree
    parent_path = ""
    for step in _steps(path):
        node = _child(node, _current(node, step), parent_path)
        parent_path = _where(parent_path, step)
    return node


def _steps(path: str) -> list[str | int]:
    if not re.fullmatch(r"[A-Za-z_]\w*(\[-?\d+\])*(\.[A-Za-z_]\w*(\[-?\d+\])*)*", path):
        raise SpecError(path, "is not a path; write it as decoder.pattern[0].residual")
    return [int(index) if index else name for index, name in re.findall(r"\[(-?\d+)\]|([A-Za-z_]\w*)", path)]


def _where(parent_path: str, step: str | int) -> str:
    return join(parent_path, step if isinstance(step, str) else f"[{step}]")


def _child(node: Any, step: str | int, parent_path: str) -> Any:
    where = _where(parent_path, step)
    if isinstance(step, int):
        if not isinstance(node, tuple):
            raise SpecError(where, f"{parent_path or 'the root'} is not a list")
        if not -len(node) <= step < len(node):
            raise SpecError(where, f"there are only {len(node)} entries, counted from 0")
        return node[step]
    if not isinstance(node, Spec):
        raise SpecError(where, f"{parent_path or 'the root'} is {_describe(node)} and has no fields")
    known = hints(type(node))
    if step not in known:
        raise SpecError(where, f"unknown key {step!r} in {type(node).kind!r}; {nearest(step, known)}")
    return getattr(node, step)


def _current(node: Any, step: str | int) -> str | int:
    """Return one step of a path. Replace a former field name by the current name, and a negative index by n + index."""
    if isinstance(step, int):
        return step % len(node) if isinstance(node, tuple) and -len(node) <= step < len(node) else step
    return current_field(type(node).kind, step) if isinstance(node, Spec) else step


def _edited(node: Any, annotation: Any, changes: Changes, parent_path: str, fitted: Callable[..., Any]) -> Any:
    groups: dict[str | int, Changes] = {}
    for (step, *rest), value in changes:
        at = _current(node, step)
        _child(node, at, parent_path)
        groups.setdefault(at, []).append((rest, value))
    new: dict[Any, Any] = {}
    for step, inner in groups.items():
        child, where = _child(node, step, parent_path), _where(parent_path, step)
        expected = hints(type(node))[step] if isinstance(step, str) else _item(annotation, step)
        whole = [value for steps, value in inner if not steps]
        if len(whole) > 1:  # such as pattern[0] and pattern[-1]
            raise SpecError(where, "is set twice; leave one of the two out")
        for value in whole:
            renamed = current_value(type(node).kind, step, value) if isinstance(step, str) else value
            child = fitted(renamed, expected, where)
        deeper = [(steps, value) for steps, value in inner if steps]
        new[step] = _edited(child, expected, deeper, where, fitted) if deeper else child
    if isinstance(node, tuple):
        return tuple(new.get(i, item) for i, item in enumerate(node))
    try:
        return replace(node, **new)
    except SpecError as error:
        raise error.inside(parent_path) from None


def _item(annotation: Any, index: int) -> Any:
    """Return the type annotation of entry `index` of a tuple. If `annotation` is a union, its tuple option is used."""
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) in (Union, UnionType):
        return next(_item(option, index) for option in options if typing.get_origin(option) is tuple)
    return options[0] if options[-1] is Ellipsis else options[index]


def to_record(tree: Spec, parts: Parts | None = None) -> dict[str, Any]:
    """Convert a spec, with all specs in its fields, to a JSON object. Defaults are included.

    If `parts` is given, a spec that `parts` does not contain gets the kind `module:Class`, which `read` accepts only
    with `trust`.
    """
    part = type(tree)
    known = parts is None or parts.get(part.kind) is part
    kind = part.kind if known else f"{part.__module__}:{part.__qualname__}"
    return {"kind": kind, **{name: plain(getattr(tree, name), parts) for name in hints(part)}}


def plain(value: Any, parts: Parts | None = None) -> Any:
    """Convert the value of a field to a JSON value."""
    if isinstance(value, Spec):
        return to_record(value, parts)
    return [plain(item, parts) for item in value] if isinstance(value, tuple) else value


def read(record: Any, expected: type[S], path: str, parts: Parts, trust: bool = False) -> S:
    """Convert a JSON value to a spec; raise SpecError with the path of an unknown key or kind, or of a wrong type.

    `record` is a mapping with a `kind`, or only a kind, which means that all fields have their defaults.
    """
    check_plain(record, path)
    return _read(record, expected, path, parts, trust)


def check_plain(record: Any, path: str = "") -> None:
    """Raise SpecError for values that are valid in JSON or TOML, but not in a spec.

    These are nesting beyond `MAX_DEPTH`, integers beyond 64 bits, and strings with lone surrogates.
    """
    waiting: list[tuple[Any, str, int]] = [(record, path, 0)]
    while waiting:
        value, where, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise SpecError(where[:40] + "...", f"is nested more than {MAX_DEPTH} levels deep; no part needs that")
        if isinstance(value, Mapping):
            waiting += [(inner, join(where, str(key)), depth + 1) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(inner, f"{where}[{i}]", depth + 1) for i, inner in enumerate(value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise SpecError(where, "is a number that does not fit in 64 bits")
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise SpecError(where, "has half a character (a lone surrogate); repair the text") from None


def _read(record: Any, expected: type[S], path: str, parts: Parts, trust: bool) -> S:
    if isinstance(record, str):
        record = {"kind": record}
    if not isinstance(record, Mapping):
        raise SpecError(path, f"needs a table with a kind, not {_describe(record)}")
    kind = record.get("kind")
    if kind is None:
        raise SpecError(join(path, "kind"), f"is missing; {nearest('', _kinds(parts, expected))}")
    part = _part(kind, expected, join(path, "kind"), parts, trust)
    known = hints(part)
    values: dict[str, Any] = {}
    for name, value in record.items():
        key = current_field(part.kind, name) if isinstance(name, str) else name
        if key == "kind":
            continue
        if key in values:
            twice = f"{key} is set twice, also by its former name; leave one of the two out"
            raise SpecError(join(path, str(name)), twice)
        if key not in known:
            raise SpecError(join(path, str(key)), f"unknown key {key!r} in {kind!r}; {nearest(str(key), known)}")
        values[key] = fit(current_value(part.kind, key, value), known[key], join(path, key), parts, trust)
    for field in fields(part):  # type: ignore[arg-type]  # every concrete spec is a dataclass
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise SpecError(join(path, field.name), f"is missing; {kind!r} has no default for it")
    try:
        return typing.cast(S, part(**values))
    except SpecError as error:
        raise error.inside(path) from None


def _part(kind: Any, expected: type[Spec], path: str, parts: Parts, trust: bool) -> type[Spec]:
    if not isinstance(kind, str):
        raise SpecError(path, f"needs a string, not {_describe(kind)}")
    if ":" in kind:
        if not trust:
            raise SpecError(path, f"{kind!r} would import code; add --trust-code if you trust it")
        return imported(kind, expected, path)
    kind = current_kind(kind)
    if kind not in parts:
        raise SpecError(path, f"unknown kind {kind!r}; {nearest(kind, _kinds(parts, expected))}")
    if not issubclass(parts[kind], expected):
        raise SpecError(path, f"{kind!r} is not a {expected.__name__}; {nearest(kind, _kinds(parts, expected))}")
    return parts[kind]


def _kinds(parts: Parts, expected: type[Spec]) -> list[str]:
    return [kind for kind, part in parts.items() if issubclass(part, expected)]


def imported(name: str, expected: type[Spec], path: str) -> type[Spec]:
    """Import and return the spec class `module:Class`. Call this only if the user trusts the code of the module."""
    spec = load(name, path)
    if not (isinstance(spec, type) and issubclass(spec, expected) and is_dataclass(spec)):
        raise SpecError(path, f"{name!r} is not a {expected.__name__} spec")
    return spec


def load(name: str, path: str = "") -> Any:
    """Import and return the object `module:name`; raise SpecError if the import fails.

    The working directory is searched last, so that no file in it can replace an installed package.
    """
    if "" not in sys.path:
        sys.path.append("")
    module, _, attribute = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        raise SpecError(path, f"cannot import {module!r}: {type(error).__name__}: {error}") from None
    if not hasattr(loaded, attribute):
        public = [known for known in vars(loaded) if not known.startswith("_")]
        raise SpecError(path, f"{module!r} has no {attribute!r}; {nearest(attribute, public)}")
    return getattr(loaded, attribute)


def walk(tree: Spec) -> Iterator[Spec]:
    """Yield every spec in the tree, starting with its root."""
    yield tree
    for name in hints(type(tree)):
        value = getattr(tree, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Spec):
                yield from walk(item)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for every field that is not a spec, and (path, kind) for every spec."""
    if isinstance(node, Spec):
        yield join(path, "kind"), type(node).kind
        for name in hints(type(node)):
            yield from leaves(getattr(node, name), join(path, name))
    elif isinstance(node, tuple):
        for i, item in enumerate(node):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, node


def diff(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return (path, value in a, value in b) for each difference. Specs of different kinds count as one difference."""
    if a == b and type(a) is type(b):
        return []
    if isinstance(a, Spec) and type(a) is type(b):
        pairs = [(join(path, name), getattr(a, name), getattr(b, name)) for name in hints(type(a))]
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        pairs = [(f"{path}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return [(path, a, b)]
    return [difference for where, x, y in pairs for difference in diff(x, y, where)]
