"""Who may import whom, and what a file may hold: the rules that keep a new variant to one file and one line.

Every guard is a function from a source file, or from specs, to complaints. It is called on all of regard, where there
must be none, and on a planted violation, where there must be one.
"""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path

import pytest

import regard
from regard import catalogue
from regard.fast import operators
from regard.recipe import recipe
from regard.tree import Spec

ROOT = Path(regard.__path__[0])
SLOTS = catalogue.SLOTS | recipe.SLOTS
# What stands in no slot: the whole of a recipe, and what is said for one search.
ALONE = {"LengthLimit", "Limits", "Recipe"}
FILES = {
    ".".join(("regard", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

# Each layer may import itself and the layers before it. `data` stands beside the models and knows none of them.
LAYERS = (
    ("aliases", "errors", "files", "processes", "tree", "batch"),
    ("nn",),
    ("models",),
    ("catalogue", "presets", "variants", "weights"),
    ("decoding",),
    ("fast",),
    ("training",),
    ("planner", "testing"),
    ("recipe",),
    ("inference", "inspection"),
    ("evaluation",),
    ("runs",),
    ("serving",),
    ("demo",),
    ("ablation", "bench"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names} | {"data": 1}


class Imports(ast.NodeVisitor):
    """The modules that a file imports when it runs; what only type checkers read does not count."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.relative = False

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.relative |= node.level > 0
        module = node.module or ""
        # `from regard.nn import norm` imports a module, `from regard.nn.norm import Norm` a name of one.
        self.found.update(f"{module}.{a.name}" if f"{module}.{a.name}" in FILES else module for a in node.names)


def imports(tree: ast.AST) -> set[str]:
    visitor = Imports()
    visitor.visit(tree)
    return visitor.found


def ours(tree: ast.AST) -> set[str]:
    return {module for module in imports(tree) if module.split(".")[0] == "regard"}


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


Complaints = Iterator[str]


def imports_are_absolute(name: str, tree: ast.AST) -> Complaints:
    visitor = Imports()
    visitor.visit(tree)
    if visitor.relative:
        yield f"{name} has a relative import"


def imports_go_down(name: str, tree: ast.AST) -> Complaints:
    here = layer(name)
    if not here:
        return
    if here not in RANK:
        yield f"{name}: say in LAYERS what {here!r} may import"
        return
    for module in ours(tree):
        there = layer(module)
        if not there and here != "cli":
            yield f"{name} imports regard itself: name the module that has what it needs"
        elif here == "data" and there not in {"data", "batch", "tree", "errors", "files", "aliases"}:
            yield f"{name} imports {module}: data knows no models"
        elif here != "data" and RANK.get(there, 0) > RANK[here]:
            yield f"{name} imports {module}, which stands above it"


def the_package_itself_imports_nothing(name: str, tree: ast.AST) -> Complaints:
    if name == "regard":
        yield from (f"regard imports {module}" for module in ours(tree))


WORDS = {
    "regard.errors": set(),
    "regard.aliases": set(),
    "regard.tree": {"regard.aliases", "regard.errors"},
    "regard.batch": {"regard.errors"},
    "regard.nn.pattern": {"regard.errors", "regard.tree"},
    "regard.nn.mask": {f"regard.nn.{name}" for name in ("memory", "pattern", "terms", "trace")},
    "regard.nn.cache": {"regard.errors", "regard.nn.mask"},
    "regard.nn.core": {"regard.errors", "regard.nn.mask", "regard.nn.cache"},
}


def the_words_that_all_share_know_no_part(name: str, tree: ast.AST) -> Complaints:
    if name in WORDS:
        yield from (f"{name} imports {module}" for module in ours(tree) - WORDS[name])


FOLDERS = ("branches", "position", "stacks", "vocab")


def siblings_share_only_their_base(name: str, tree: ast.AST) -> Complaints:
    """One exception: experts may build feed-forwards. (In vocab, heads are handed tables.)"""
    for folder in FOLDERS:
        prefix = f"regard.nn.{folder}."
        if not name.startswith(prefix) or name == f"{prefix}experts":
            continue
        allowed = {f"{prefix}base"} | ({f"{prefix}tables"} if folder == "vocab" else set())
        for module in ours(tree) - allowed:
            if module.startswith(prefix):
                yield f"{name} imports {module}: move what they share to {prefix}base"


GENERAL = {f"regard.models.{name}" for name in ("base", "build", "decoding", "loss")}


def training_and_decoding_know_no_family(name: str, tree: ast.AST) -> Complaints:
    if layer(name) in {"training", "decoding"}:
        for module in ours(tree) - GENERAL:
            if layer(module) == "models":
                yield f"{name} imports the family {module}"


def only_one_file_knows_about_ranks(name: str, tree: ast.AST) -> Complaints:
    if name != "regard.training.parallel" and any(m.startswith("torch.distributed") for m in imports(tree)):
        yield f"{name} imports torch.distributed"


def names(tree: ast.AST) -> Iterator[str]:
    """Every name and attribute that is used or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.name.split(".")[-1] for alias in node.names)


ATTENTION_KERNELS = {"scaled_dot_product_attention", "flex_attention", "varlen_attn", "MultiheadAttention"}
# regard.nn has the formula. The peers are other people's layers.
DOORS = {"regard.fast.attention": ATTENTION_KERNELS}
PEERS = "regard.bench.peers."


def one_door_to_attention_kernels(name: str, tree: ast.AST) -> Complaints:
    used = (ATTENTION_KERNELS & set(names(tree))) - DOORS.get(name, set())
    if used and not name.startswith(PEERS):
        yield f"{name} calls {', '.join(sorted(used))} itself"


FORMULAS = ("branches", "norm", "residual", "block", "core")  # of nn: what a paper says
SPEED = {"is_cuda", "is_cpu", "autocast", "is_autocast_enabled", "is_compiling", "is_inference_mode_enabled", "triton"}


def formulas_hold_no_code_for_speed(name: str, tree: ast.AST) -> Complaints:
    """No question about device, autocast or kind of cache: what is only fast is a class of regard.fast."""
    if not any(f"{name}.".startswith(f"regard.nn.{part}.") for part in FORMULAS):
        return
    for used in SPEED & set(names(tree)):
        yield f"{name} uses {used}: put that into regard.fast"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            kinds = ast.unparse(node.args[1])
            if "Cache" in kinds or "KV" in kinds:
                yield f"{name} tests for {kinds}: put that into regard.fast"


def only_the_command_line_prints(name: str, tree: ast.AST) -> Complaints:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    if layer(name) != "cli" and any(isinstance(func, ast.Name) and func.id == "print" for func in calls):
        yield f"{name} prints"


def one_place_starts_python(name: str, tree: ast.AST) -> Complaints:
    """So that no process imports from the working folder: neither `python -m`, nor what multiprocessing spawns."""
    if name != "regard.processes" and {"executable", "multiprocessing"} & set(names(tree)):
        yield f"{name} starts Python itself: use regard.processes.python"


def files_are_named_for_a_concept(name: str, tree: ast.AST) -> Complaints:
    if name.rpartition(".")[2] in {"utils", "util", "common", "helpers", "helper", "misc"}:
        yield f"{name} says nothing of what is in it"


GUARDS: dict[Callable[[str, ast.AST], Complaints], tuple[str, str]] = {
    # Each with a violation: the name of a file, and what would stand in it.
    imports_are_absolute: ("regard.nn.norm", "from .core import Site"),
    imports_go_down: ("regard.nn.norm", "from regard.models.base import build"),
    the_package_itself_imports_nothing: ("regard", "from regard.tree import Spec"),
    the_words_that_all_share_know_no_part: ("regard.nn.core", "def f():\n    from regard.nn.norm import Norm"),
    siblings_share_only_their_base: ("regard.nn.branches.mine", "import regard.nn.branches.self_attention"),
    training_and_decoding_know_no_family: (
        "regard.decoding.mine",
        "from regard.models.decoder_only_translator import Joined",
    ),
    only_one_file_knows_about_ranks: ("regard.training.trainer", "import torch.distributed as dist"),
    one_door_to_attention_kernels: (
        "regard.nn.branches.mine",
        "import torch.nn.functional as F\ny = F.scaled_dot_product_attention(q, k, v)",
    ),
    formulas_hold_no_code_for_speed: ("regard.nn.branches.mine", "def f(x):\n    return g(x) if x.is_cuda else x"),
    only_the_command_line_prints: ("regard.nn.norm", "def f(x):\n    print(x)"),
    one_place_starts_python: (
        "regard.runs.workers",
        "command = [sys.executable, '-m', 'regard.runs.workers']",
    ),
    files_are_named_for_a_concept: ("regard.nn.utils", ""),
}


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_guard(guard: Callable[[str, ast.AST], Complaints]) -> None:
    assert len(TREES) > 100
    assert [complaint for name, tree in TREES.items() for complaint in guard(name, tree)] == []


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_guard_finds_a_planted_violation(guard: Callable[[str, ast.AST], Complaints]) -> None:
    name, source = GUARDS[guard]
    assert len(list(guard(name, ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("regard.data.text", "from regard.nn.norm import Norm"),
        ("regard.nn.norm", "import regard"),
        ("regard.unheard_of", "import regard.errors"),
        ("regard.nn.norm", "def f():\n    import regard.models.base"),
    ],
)
def test_imports_go_down_finds_more(name: str, source: str) -> None:
    assert list(imports_go_down(name, ast.parse(source)))


@pytest.mark.parametrize("kernel", sorted(ATTENTION_KERNELS))
def test_no_other_door_to_any_kernel(kernel: str) -> None:
    for source in (f"from torch.nn.attention import {kernel}", f"y = torch.nn.functional.{kernel}(q, k, v)"):
        assert list(one_door_to_attention_kernels("regard.nn.branches.mine", ast.parse(source)))
        assert not list(one_door_to_attention_kernels("regard.fast.attention", ast.parse(source)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("regard.nn.norm", "import triton"),
        ("regard.nn.core", "with torch.autocast('cuda'):\n    pass"),
        ("regard.nn.block", "quick = isinstance(state, KVCache)"),
    ],
)
def test_guard_of_formulas_finds_more(name: str, source: str) -> None:
    assert list(formulas_hold_no_code_for_speed(name, ast.parse(source)))
    assert not list(formulas_hold_no_code_for_speed("regard.fast.attention", ast.parse(source)))


def test_guards_let_the_innocent_pass() -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from regard.models.base import build"
    for name, source in {"regard.nn.norm": typed, "regard.cli.check": "print(1)"}.items():
        assert [complaint for guard in GUARDS for complaint in guard(name, ast.parse(source))] == []


def declared(trees: Iterable[ast.AST]) -> list[str]:
    """The operators that are made known to torch, by name."""
    return sorted(
        ast.literal_eval(decorator.args[0])
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(("operator", "custom_op"))
    )


def test_torch_compile_is_told_of_every_operator() -> None:
    assert declared(TREES.values()) == sorted(f"regard::{name}" for name in operators.NAMES)
    planted = ast.parse("@torch.library.custom_op('regard::planted', mutates_args=())\ndef f(x): ...")
    assert declared([planted]) == ["regard::planted"]


# They need Triton, and hold no specs.
NEED_TRITON = {
    "regard.fast.dropout_rng",
    "regard.fast.packed_attention",
    "regard.fast.layer_norm",
    "regard.fast.linear_relu",
}


def specs() -> list[type[Spec]]:
    """Every spec class of the package that describes something: a dataclass with a kind."""
    for module in pkgutil.walk_packages(regard.__path__, "regard."):
        if not module.name.endswith("__main__") and module.name not in NEED_TRITON:
            importlib.import_module(module.name)
    found, left = [], [Spec]
    while left:
        part = left.pop()
        left += part.__subclasses__()
        if not part.__module__.startswith("regard."):
            continue
        # Slots make a second class of a dataclass; the first is not in its module.
        here = getattr(importlib.import_module(part.__module__), part.__name__, None)
        if here is part and is_dataclass(part):
            found.append(part)
    return found


def uncatalogued(found: Iterable[type[Spec]], slots: Mapping[type[Spec], Sequence[type[Spec]]]) -> Complaints:
    catalogued = [part for parts in slots.values() for part in parts]
    yield from (f"{part.__qualname__} stands in two slots" for part in set(catalogued) if catalogued.count(part) > 1)
    missing = {part.__qualname__ for part in found} - ALONE ^ {part.__qualname__ for part in catalogued}
    yield from (f"{name} is a spec or in the catalogue, and not both" for name in sorted(missing))
    kinds = [part.kind for part in dict.fromkeys(catalogued)]
    yield from (f"two parts of kind {kind!r}" for kind in set(kinds) if kinds.count(kind) > 1)


def disordered(slot: type[Spec], parts: Sequence[type[Spec]]) -> Complaints:
    given = [part.__name__ for part in parts]
    if given not in (sorted(given, key=str.lower), sorted(given)):
        yield f"{slot.__name__}: keep the catalogue in alphabetical order"
    for part in (slot, *parts):
        # A dataclass without a docstring is given its signature as one.
        if not part.__doc__ or part.__doc__.startswith(f"{part.__name__}("):
            yield f"{part.__name__} has no docstring"


def loose(found: Iterable[type[Spec]]) -> Complaints:
    for part in found:
        if not part.__dataclass_params__.frozen:  # type: ignore[reportAttributeAccessIssue]
            yield f"{part.__name__} is not frozen"
        if "__slots__" not in vars(part):
            yield f"{part.__name__} has no slots"


def test_every_spec_is_in_the_catalogue_once() -> None:
    assert len(specs()) > 100
    assert list(uncatalogued(specs(), SLOTS)) == []


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.__name__)
def test_slots_are_sorted_and_their_parts_documented(slot: type[Spec]) -> None:
    assert list(disordered(slot, SLOTS[slot])) == []


def test_specs_are_frozen_and_slotted() -> None:
    assert list(loose(specs())) == []


@dataclass(frozen=True, slots=True)
class Kept(Spec):
    """A part as it should be."""

    kind = "kept"


@dataclass(frozen=True, slots=True)
class Alike(Spec):
    """A part of another's kind."""

    kind = "kept"


@dataclass(frozen=True, slots=True)
class Undocumented(Spec):
    kind = "undocumented"


@dataclass
class Loose(Spec):
    """A part that is neither frozen nor slotted."""

    kind = "loose"


def test_planted_specs_are_found() -> None:
    assert list(uncatalogued([Kept], {Spec: (Kept,)})) == []
    assert list(uncatalogued([Kept], {Spec: ()}))
    assert list(uncatalogued([], {Spec: (Kept,)}))
    assert list(uncatalogued([Kept], {Spec: (Kept, Kept)}))
    assert list(uncatalogued([Kept, Alike], {Spec: (Kept, Alike)})) == ["two parts of kind 'kept'"]
    assert list(disordered(Spec, (Alike, Kept))) == []
    assert list(disordered(Spec, (Kept, Alike)))
    assert list(disordered(Spec, (Kept, Undocumented))) == ["Undocumented has no docstring"]
    assert list(loose([Kept])) == []
    assert list(loose([Loose])) == ["Loose is not frozen", "Loose has no slots"]
