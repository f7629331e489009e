"""Variants: modifications of a model, as functions from a model spec (its configuration) to a model spec.

They include the 52 rows of the table in Narang et al. 2021, as published (docs/decisions/008-rows-of-the-table.md lists
the exceptions), and later methods. If a method's original paper differs from Narang et al., a second variant follows
the original paper. There is one file per group of variants. To add a variant, add an entry to `VARIANTS` in a file.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from regard.catalogue import PARTS
from regard.errors import SpecError, nearest
from regard.models.base import ModelSpec
from regard.models.build import count
from regard.nn.position.base import AtHeads
from regard.nn.stacks.base import StackSpec
from regard.presets import preset
from regard.tree import diff, load, plain, walk
from regard.variants.base import Edit, Variant
from regard.variants.table import ROWS

MODULES = (
    "activations", "attention", "convolutions", "depth", "experts", "family", "norms", "positions",
    "residuals", "sharing", "synthesizers", "transparent", "vocabulary", "weighted", "wiring", "without",
)  # fmt: skip
VARIANTS: dict[str, Variant] = {"vanilla": Variant(lambda m: m, "base", "the unchanged base", "Vaswani et al. 2017")}
for module in MODULES:
    VARIANTS |= import_module(f"regard.variants.{module}").VARIANTS
VARIANTS = {name: replace(entry, row=ROWS.get(name)) for name, entry in sorted(VARIANTS.items())}

# Presets to suggest when a variant has no effect on the user's model.
EXAMPLES = ("transformer_small", "gpt2_small", "bert_base", "t5_base")


def variant(name: str, trust_code: bool = False, path: str = "variants") -> Variant:
    """Return the variant `name`. A name `module:function` refers to your own function that edits a model spec."""
    if ":" not in name:
        if name not in VARIANTS:
            raise SpecError(path, f"unknown variant {name!r}; {nearest(name, VARIANTS)}")
        return VARIANTS[name]
    if not trust_code:
        raise SpecError(path, f"{name!r} would import code; add --trust-code if you trust it")
    edit = load(name, path)
    if not callable(edit):
        raise SpecError(path, f"{name!r} is not a function; it must take a model spec and return a model spec")
    about = (inspect.getdoc(edit) or "").partition("\n")[0]
    return Variant(lambda spec: _own(name, edit, spec), "own", about or f"the function {name}")


def _own(name: str, edit: Edit, spec: ModelSpec) -> ModelSpec:
    """Return a model spec edited by the user's function. If the function fails, raise a SpecError of one sentence."""
    try:
        changed = edit(spec)
    except SpecError:
        raise
    except Exception as error:
        raise SpecError("variants", f"{name!r} failed with {type(error).__name__}: {error}") from None
    if not isinstance(changed, ModelSpec):
        raise SpecError("variants", f"{name!r} returned {type(changed).__name__}; it must return a model spec")
    return changed


def apply(name: str, spec: ModelSpec, trust_code: bool = False) -> ModelSpec:
    """Return the model spec with the modification `name`. Raise an error if the modification changes nothing."""
    entry = variant(name, trust_code)
    if name == "vanilla":
        return spec
    if entry.group != "own" and not any(isinstance(part, StackSpec) for part in walk(spec)):
        problem = f"{name!r} modifies stacks of blocks, but {type(spec).kind!r} has none"
        raise SpecError("variants", f"{problem}; set its fields instead")
    changed = entry.edit(spec)
    if not diff(spec, changed):
        raise SpecError("variants", f"{name!r} changes nothing here{_suggestion(entry, spec)}")
    return changed


def _suggestion(unused: Variant, spec: ModelSpec) -> str:
    """Return the end of the error message about a variant without effect: the reason, and what to do."""
    for name in EXAMPLES:
        example = preset(name)
        try:
            if type(example) is type(spec) and diff(example, unused.edit(example)):
                return f": this model already has it, or has no layer to change; leave it out, or start from {name}"
        except SpecError:
            continue
    return ": this model already has it, or has no layer to change; leave it out"


def combine(names: Sequence[str], base: ModelSpec, trust_code: bool = False) -> ModelSpec:
    """Return `base` with several modifications, applied in order. If two of them conflict, raise an error."""
    spec = base
    before = {part.kind for part in walk(spec)}
    added: dict[str, set[str]] = {}
    for i, name in enumerate(names):
        try:
            spec = apply(name, spec, trust_code)
        except SpecError as error:
            if not i:
                raise
            reason, earlier = str(error).removeprefix("variants: "), " and ".join(map(repr, names[:i]))
            raise SpecError("variants", f"{name!r} cannot be applied after {earlier}: {reason}") from None
        if i:
            try:
                count(spec)
            except SpecError as error:
                failing = (other for other in names[:i] if not _builds((other, name), base, trust_code))
                other = next(failing, names[i - 1])
                raise SpecError("variants", f"{other!r} and {name!r} cannot be combined: {error}") from None
            for other in names[:i]:
                if _unused(other, names[: i + 1], base, spec, trust_code):
                    raise SpecError("variants", f"{name!r} undoes {other!r}; choose one of the two")
        kinds = {part.kind for part in walk(spec)}
        for other, new in added.items():
            if not new <= kinds:
                lost = f"a part that {other!r} added ({', '.join(sorted(new - kinds))})"
                raise SpecError("variants", f"{name!r} removes {lost}; choose one of the two")
        added[name] = kinds - before - {AtHeads.kind}  # added and removed together with attention layers
        before = kinds
    return spec


def _unused(name: str, names: Sequence[str], base: ModelSpec, spec: ModelSpec, trust_code: bool) -> bool:
    """Return True if `base` modified by `names` without `name` equals `spec`: another modification undoes `name`."""
    without = base
    try:
        for other in names:
            if other != name:
                without = apply(other, without, trust_code)
    except SpecError:  # the other modifications require this one
        return False
    return without == spec


def _builds(names: Sequence[str], spec: ModelSpec, trust_code: bool) -> bool:
    try:
        for name in names:
            spec = apply(name, spec, trust_code)
        count(spec)
    except SpecError:
        return False
    return True


def select(names: Sequence[str] = (), group: str | None = None) -> list[str]:
    """Return the names of the selected variants. If `group` is given, return only those in this group.

    `names` may contain names of variants, names of groups, `all`, and `table` (the 52 rows of Narang et al. 2021). The
    52 rows come first, in the order of the table. The other variants follow, sorted by name, and names of the form
    `module:function` come last.
    """
    groups = {variant.group for variant in VARIANTS.values()}
    if group is not None and group not in groups:
        raise SpecError("group", f"unknown group {group!r}; {nearest(group, sorted(groups))}")
    selected: list[str] = []
    for name in names or ("all",):
        if name == "all":
            selected += VARIANTS
        elif name == "table":
            selected += (each for each, variant in VARIANTS.items() if variant.row is not None)
        elif name in groups:
            selected += (each for each, variant in VARIANTS.items() if variant.group == name)
        elif name in VARIANTS or ":" in name:
            selected.append(name)
        else:
            known = nearest(name, [*VARIANTS, *groups, "all", "table"])
            raise SpecError("rows", f"unknown variant {name!r}; {known}" if name else f"names nothing; {known}")
    names = [
        name for name in dict.fromkeys(selected) if group in (None, "own" if ":" in name else VARIANTS[name].group)
    ]
    return sorted(names, key=lambda name: (ROWS[name].number if name in ROWS else 1000 + (":" in name), name))


def described(name: str, base: ModelSpec, trust_code: bool = False) -> dict[str, Any]:
    """Return a variant's description and the changes that the variant makes to `base`, as a JSON object."""
    entry = variant(name, trust_code)
    facts: dict[str, Any] = {
        "name": name,
        "group": entry.group,
        "row": None if entry.row is None else entry.row.number,
        "about": entry.about,
        "paper": entry.paper,
        "bends": dict(entry.bends),
        "parameters": None,
        "changes": [],
        "refused": None,
    }
    try:
        changed = apply(name, base, trust_code)
        facts["parameters"] = count(changed)
    except SpecError as error:
        return facts | {"refused": str(error)}
    changes = [(path, plain(a, PARTS), plain(b, PARTS)) for path, a, b in diff(base, changed)]
    return facts | {"changes": [{"path": path, "before": a, "after": b} for path, a, b in changes]}
