"""The table of modifications: a variant is a function from description to description.

The 52 rows of Narang et al. 2021 in the form that was run (but for what docs/decisions/008-rows-of-the-table.md lists),
where a paper's method differs a second entry, and what came since. One file per group; a new variant is one entry.
"""

from collections.abc import Sequence
from typing import Any

from regard.catalogue import PARTS
from regard.errors import SpecError, nearest
from regard.models.base import ModelSpec
from regard.models.build import count
from regard.nn.position.base import AtHeads
from regard.nn.stacks.base import StackSpec
from regard.tree import diff, plain, walk
from regard.variants import (
    activations,
    attention,
    convolutions,
    depth,
    experts,
    family,
    norms,
    positions,
    residuals,
    sharing,
    synthesizers,
    transparent,
    vocabulary,
    weighted,
    wiring,
    without,
)
from regard.variants.base import Row, Variant

BASE = Variant(lambda m: m, "base", "the base as it is", "Vaswani et al. 2017", Row(1, 223_043_328, 223_435_776))
VARIANTS: dict[str, Variant] = {"vanilla": BASE}
for group in (
    activations,
    attention,
    convolutions,
    depth,
    experts,
    family,
    norms,
    positions,
    residuals,
    sharing,
    synthesizers,
    transparent,
    vocabulary,
    weighted,
    wiring,
    without,
):
    VARIANTS |= group.VARIANTS
VARIANTS = dict(sorted(VARIANTS.items()))


def apply(name: str, spec: ModelSpec) -> ModelSpec:
    """`spec` with a modification. One that would change nothing is refused: a run must be what it is called."""
    if name not in VARIANTS:
        raise SpecError("variants", f"unknown variant {name!r}; {nearest(name, VARIANTS)}")
    if name != "vanilla" and not any(isinstance(part, StackSpec) for part in walk(spec)):
        raise SpecError(
            "variants",
            f"{name!r} modifies stacks of blocks, which {type(spec).kind!r} has none of; set its fields instead",
        )
    changed = VARIANTS[name].edit(spec)
    if name != "vanilla" and not diff(spec, changed):
        raise SpecError("variants", f"{name!r} changes nothing here: the model has it already, or has no place for it")
    return changed


def combine(names: Sequence[str], base: ModelSpec) -> ModelSpec:
    """`base` with several modifications, one after the other. Two that do not go together are refused by name."""
    spec = base
    before = {part.kind for part in walk(spec)}
    brought: dict[str, set[str]] = {}
    for i, name in enumerate(names):
        spec = _after(names[:i], name, spec) if i else apply(name, spec)
        if i:
            try:
                count(spec)
            except SpecError as error:
                other = next((other for other in names[:i] if not _builds((other, name), base)), names[i - 1])
                raise SpecError("variants", f"{other!r} and {name!r} do not go together: {error}") from None
            lost = next((other for other in names[:i] if _idle(other, names[: i + 1], base, spec)), None)
            if lost is not None:
                raise SpecError("variants", f"{name!r} leaves nothing of {lost!r}; choose one of the two")
        kinds = {part.kind for part in walk(spec)}
        for other, new in brought.items():
            if not new <= kinds:
                gone = ", ".join(sorted(new - kinds))
                raise SpecError(
                    "variants", f"{name!r} takes away what {other!r} brought ({gone}); choose one of the two"
                )
        brought[name] = kinds - before - {AtHeads.kind}  # positions follow the attentions they are for
        before = kinds
    return spec


def _idle(name: str, names: Sequence[str], base: ModelSpec, spec: ModelSpec) -> bool:
    """Whether `spec` would be the same without the modification `name`, which would then be said and not done."""
    without = base
    try:
        for other in names:
            if other != name:
                without = apply(other, without)
    except SpecError:  # the others need it
        return False
    return without == spec


def _builds(names: Sequence[str], spec: ModelSpec) -> bool:
    try:
        for name in names:
            spec = apply(name, spec)
        count(spec)
    except SpecError:
        return False
    return True


def _after(earlier: Sequence[str], name: str, spec: ModelSpec) -> ModelSpec:
    try:
        return apply(name, spec)
    except SpecError as error:
        reason = str(error).removeprefix("variants: ")
        raise SpecError("variants", f"{name!r} cannot follow {' and '.join(map(repr, earlier))}: {reason}") from None


def chosen(names: Sequence[str] = (), group: str | None = None) -> list[str]:
    """The variants of these names, of a group, or all: the rows of the table in their order, then the others by name.

    Among the names, `all`, `table` (the 52 rows) and the name of a group stand for their variants.
    """
    groups = {variant.group for variant in VARIANTS.values()}
    if group is not None and group not in groups:
        raise SpecError("group", f"unknown group {group!r}; {nearest(group, sorted(groups))}")
    found: list[str] = []
    for name in names or ("all",):
        if name == "all":
            found += VARIANTS
        elif name == "table":
            found += (each for each, variant in VARIANTS.items() if variant.row is not None)
        elif name in groups:
            found += (each for each, variant in VARIANTS.items() if variant.group == name)
        elif name in VARIANTS:
            found.append(name)
        else:
            known = nearest(name, [*VARIANTS, *groups, "all", "table"])
            raise SpecError("rows", f"unknown variant {name!r}; {known}" if name else f"names nothing; {known}")
    kept = [name for name in dict.fromkeys(found) if group in (None, VARIANTS[name].group)]
    return sorted(kept, key=lambda name: (_number(name), name))


def _number(name: str) -> int:
    row = VARIANTS[name].row
    return 1000 if row is None else row.number


def described(name: str, base: ModelSpec) -> dict[str, Any]:
    """All that is known of a variant and of what it makes of `base`, as plain values."""
    variant = VARIANTS[name]
    facts: dict[str, Any] = {
        "name": name,
        "group": variant.group,
        "row": None if variant.row is None else variant.row.number,
        "about": variant.about,
        "paper": variant.paper,
        "bends": dict(variant.bends),
        "parameters": None,
        "changes": [],
        "refused": None,
    }
    try:
        changed = apply(name, base)
        facts["parameters"] = count(changed)
    except SpecError as error:
        return facts | {"refused": str(error)}
    changes = [(path, plain(a, PARTS), plain(b, PARTS)) for path, a, b in diff(base, changed)]
    return facts | {"changes": [{"path": path, "before": a, "after": b} for path, a, b in changes]}
