"""Rules on what modules may import and contain, so that a new variant needs only one new file and one line.

Every rule is a function that yields the violations in a source file or in specs. It is called on all of regard, where
there must be no violation, and on an example with one violation.
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
# Specs that are not parts of a model or a recipe: a whole recipe, and the limits of one search.
ALONE = {"LengthLimit", "Limits", "Recipe"}
FILES = {
    ".".join(("regard", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

# Each layer may import itself and the layers before it. `data` is beside the models and imports none of them.
LAYERS = (
    ("aliases", "errors", "files", "processes", "cluster", "tree", "batch"),
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
    ("lens",),
    ("demo",),
    ("ablation", "bench", "doctor"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names} | {"data": 1}


class Imports(ast.NodeVisitor):
    """Collect the modules that a file imports when it runs; imports for type checkers do not count."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.relative = False

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.modules.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.relative |= node.level > 0
        module = node.module or ""
        # `from regard.nn import norm` imports a module, `from regard.nn.norm import Norm` a name of one.
        self.modules.update(f"{module}.{a.name}" if f"{module}.{a.name}" in FILES else module for a in node.names)


def imports(tree: ast.AST) -> set[str]:
    visitor = Imports()
    visitor.visit(tree)
    return visitor.modules


def own_imports(tree: ast.AST) -> set[str]:
    return {module for module in imports(tree) if module.split(".")[0] == "regard"}


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


Violations = Iterator[str]


def imports_are_absolute(name: str, tree: ast.AST) -> Violations:
    visitor = Imports()
    visitor.visit(tree)
    if visitor.relative:
        yield f"{name} has a relative import"


def imports_follow_the_layers(name: str, tree: ast.AST) -> Violations:
    here = layer(name)
    if not here:
        return
    if here not in RANK:
        yield f"{name}: add {here!r} to LAYERS"
        return
    for module in own_imports(tree):
        there = layer(module)
        if not there and here != "cli":
            yield f"{name} imports regard itself; import the module that defines the name"
        elif here == "data" and there not in {"data", "batch", "tree", "errors", "files", "aliases"}:
            yield f"{name} imports {module}, but data must not depend on models"
        elif here != "data" and RANK.get(there, 0) > RANK[here]:
            yield f"{name} imports {module}, which is in a higher layer"


def the_package_itself_imports_nothing(name: str, tree: ast.AST) -> Violations:
    if name == "regard":
        yield from (f"regard imports {module}" for module in own_imports(tree))


BASIC_IMPORTS = {
    "regard.errors": set(),
    "regard.aliases": set(),
    "regard.tree": {"regard.aliases", "regard.errors"},
    "regard.batch": {"regard.errors"},
    "regard.nn.pattern": {"regard.nn.checks", "regard.tree"},
    "regard.nn.mask": {f"regard.nn.{name}" for name in ("memory", "pattern", "terms", "trace")},
    "regard.nn.cache": {"regard.errors", "regard.nn.mask"},
    "regard.nn.core": {"regard.errors", "regard.nn.mask", "regard.nn.cache"},
}


def basic_modules_import_no_parts(name: str, tree: ast.AST) -> Violations:
    if name in BASIC_IMPORTS:
        yield from (f"{name} imports {module}" for module in own_imports(tree) - BASIC_IMPORTS[name])


FOLDERS = ("branches", "position", "stacks", "vocab")


def parts_import_only_their_base(name: str, tree: ast.AST) -> Violations:
    """There is one exception: experts may build feed-forward layers. In `vocab`, heads may import tables."""
    for folder in FOLDERS:
        prefix = f"regard.nn.{folder}."
        if not name.startswith(prefix) or name == f"{prefix}experts":
            continue
        allowed = {f"{prefix}base"} | ({f"{prefix}tables"} if folder == "vocab" else set())
        for module in own_imports(tree) - allowed:
            if module.startswith(prefix):
                yield f"{name} imports {module}; move shared code to {prefix}base"


GENERAL = {f"regard.models.{name}" for name in ("base", "build", "decoding", "loss")}


def training_and_decoding_import_no_model_type(name: str, tree: ast.AST) -> Violations:
    if layer(name) in {"training", "decoding"}:
        for module in own_imports(tree) - GENERAL:
            if layer(module) == "models":
                yield f"{name} imports the model type {module}"


def only_one_package_imports_torch_distributed(name: str, tree: ast.AST) -> Violations:
    if not f"{name}.".startswith("regard.training.parallel.") and any(
        m.startswith("torch.distributed") for m in imports(tree)
    ):
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
# regard.nn has the formula. Peers are other libraries in benchmarks.
CALLERS = {
    "regard.fast.attention": ATTENTION_KERNELS,
    "regard.fast.chunked_attention": {"scaled_dot_product_attention"},
    "regard.fast.flex": {"flex_attention"},
}
PEERS = "regard.bench.peers."


def only_one_file_uses_attention_kernels(name: str, tree: ast.AST) -> Violations:
    used = (ATTENTION_KERNELS & set(names(tree))) - CALLERS.get(name, set())
    if used and not name.startswith(PEERS):
        yield f"{name} uses {', '.join(sorted(used))}; only {', '.join(CALLERS)} may"


FORMULAS = ("branches", "norm", "residual", "block", "core")  # modules of nn with the formulas of papers
SPEED = {"is_cuda", "is_cpu", "autocast", "is_autocast_enabled", "is_compiling", "is_inference_mode_enabled", "triton"}


def formulas_contain_no_code_for_speed(name: str, tree: ast.AST) -> Violations:
    """Formulas do not depend on device, autocast or type of cache: faster versions are classes in regard.fast."""
    if not any(f"{name}.".startswith(f"regard.nn.{part}.") for part in FORMULAS):
        return
    for used in SPEED & set(names(tree)):
        yield f"{name} uses {used}; move this code to regard.fast"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            kinds = ast.unparse(node.args[1])
            if "Cache" in kinds or "KV" in kinds:
                yield f"{name} tests for {kinds}; move this code to regard.fast"


def only_the_command_line_prints(name: str, tree: ast.AST) -> Violations:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    if layer(name) != "cli" and any(isinstance(func, ast.Name) and func.id == "print" for func in calls):
        yield f"{name} prints"


def only_one_file_starts_python(name: str, tree: ast.AST) -> Violations:
    """Processes started by `python -m` or multiprocessing elsewhere might import modules from the working folder."""
    if name != "regard.processes" and {"executable", "multiprocessing"} & set(names(tree)):
        yield f"{name} starts Python; use regard.processes.python"


def files_are_named_for_a_concept(name: str, tree: ast.AST) -> Violations:
    if name.rpartition(".")[2] in {"utils", "util", "common", "helpers", "helper", "misc"}:
        yield f"{name} does not describe its contents"


RULES: dict[Callable[[str, ast.AST], Violations], tuple[str, str]] = {
    # Each with an example of a violation: the name of a file, and its contents.
    imports_are_absolute: ("regard.nn.norm", "from .core import Site"),
    imports_follow_the_layers: ("regard.nn.norm", "from regard.models.base import build"),
    the_package_itself_imports_nothing: ("regard", "from regard.tree import Spec"),
    basic_modules_import_no_parts: ("regard.nn.core", "def f():\n    from regard.nn.norm import Norm"),
    parts_import_only_their_base: ("regard.nn.branches.mine", "import regard.nn.branches.self_attention"),
    training_and_decoding_import_no_model_type: (
        "regard.decoding.mine",
        "from regard.models.decoder_only_translator import Joined",
    ),
    only_one_package_imports_torch_distributed: ("regard.training.trainer", "import torch.distributed as dist"),
    only_one_file_uses_attention_kernels: (
        "regard.nn.branches.mine",
        "import torch.nn.functional as F\ny = F.scaled_dot_product_attention(q, k, v)",
    ),
    formulas_contain_no_code_for_speed: ("regard.nn.branches.mine", "def f(x):\n    return g(x) if x.is_cuda else x"),
    only_the_command_line_prints: ("regard.nn.norm", "def f(x):\n    print(x)"),
    only_one_file_starts_python: (
        "regard.runs.workers",
        "command = [sys.executable, '-m', 'regard.runs.workers']",
    ),
    files_are_named_for_a_concept: ("regard.nn.utils", ""),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_regard_follows_the_rule(rule: Callable[[str, ast.AST], Violations]) -> None:
    assert len(TREES) > 100
    assert [violation for name, tree in TREES.items() for violation in rule(name, tree)] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_finds_the_violation_in_the_example(rule: Callable[[str, ast.AST], Violations]) -> None:
    name, source = RULES[rule]
    assert len(list(rule(name, ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("regard.data.text", "from regard.nn.norm import Norm"),
        ("regard.nn.norm", "import regard"),
        ("regard.unheard_of", "import regard.errors"),
        ("regard.nn.norm", "def f():\n    import regard.models.base"),
    ],
)
def test_rule_on_layers_finds_other_violations(name: str, source: str) -> None:
    assert list(imports_follow_the_layers(name, ast.parse(source)))


@pytest.mark.parametrize("kernel", sorted(ATTENTION_KERNELS))
def test_rule_on_kernels_finds_every_kernel(kernel: str) -> None:
    for source in (f"from torch.nn.attention import {kernel}", f"y = torch.nn.functional.{kernel}(q, k, v)"):
        assert list(only_one_file_uses_attention_kernels("regard.nn.branches.mine", ast.parse(source)))
        assert not list(only_one_file_uses_attention_kernels("regard.fast.attention", ast.parse(source)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("regard.nn.norm", "import triton"),
        ("regard.nn.core", "with torch.autocast('cuda'):\n    pass"),
        ("regard.nn.block", "quick = isinstance(state, KVCache)"),
    ],
)
def test_rule_on_formulas_finds_other_violations(name: str, source: str) -> None:
    assert list(formulas_contain_no_code_for_speed(name, ast.parse(source)))
    assert not list(formulas_contain_no_code_for_speed("regard.fast.attention", ast.parse(source)))


def test_rules_accept_imports_for_type_checkers_and_printing_commands() -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from regard.models.base import build"
    for name, source in {"regard.nn.norm": typed, "regard.cli.check": "print(1)"}.items():
        assert [violation for rule in RULES for violation in rule(name, ast.parse(source))] == []


def declared(trees: Iterable[ast.AST]) -> list[str]:
    """Return the names of the operators that are registered with torch."""
    return sorted(
        ast.literal_eval(decorator.args[0])
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(("operator", "custom_op"))
    )


def test_every_operator_is_listed_for_torch_compile() -> None:
    assert declared(TREES.values()) == sorted(f"regard::{name}" for name in operators.NAMES)
    example = ast.parse("@torch.library.custom_op('regard::example', mutates_args=())\ndef f(x): ...")
    assert declared([example]) == ["regard::example"]


# These modules need Triton, and define no specs.
NEED_TRITON = {
    "regard.fast.dropout_rng",
    "regard.fast.packed_attention",
    "regard.fast.layer_norm",
    "regard.fast.linear_relu",
}


def specs() -> list[type[Spec]]:
    """Return every spec class of the package that is a dataclass, and so not abstract."""
    for module in pkgutil.walk_packages(regard.__path__, "regard."):
        if not module.name.endswith("__main__") and module.name not in NEED_TRITON:
            importlib.import_module(module.name)
    classes, queue = [], [Spec]
    while queue:
        part = queue.pop()
        queue += part.__subclasses__()
        if not part.__module__.startswith("regard."):
            continue
        # With slots, the decorator makes a second class; the first one is no longer in the module.
        here = getattr(importlib.import_module(part.__module__), part.__name__, None)
        if here is part and is_dataclass(part):
            classes.append(part)
    return classes


def uncatalogued(classes: Iterable[type[Spec]], slots: Mapping[type[Spec], Sequence[type[Spec]]]) -> Violations:
    catalogued = [part for parts in slots.values() for part in parts]
    yield from (f"{part.__qualname__} is in two slots" for part in set(catalogued) if catalogued.count(part) > 1)
    missing = {part.__qualname__ for part in classes} - ALONE ^ {part.__qualname__ for part in catalogued}
    yield from (f"{name} is a spec without an entry in the catalogue, or the reverse" for name in sorted(missing))
    kinds = [part.kind for part in dict.fromkeys(catalogued)]
    yield from (f"two parts of kind {kind!r}" for kind in set(kinds) if kinds.count(kind) > 1)


def disordered(slot: type[Spec], parts: Sequence[type[Spec]]) -> Violations:
    entries = [part.__name__ for part in parts]
    if entries not in (sorted(entries, key=str.lower), sorted(entries)):
        yield f"{slot.__name__}: keep the catalogue in alphabetical order"
    for part in (slot, *parts):
        # The decorator sets the signature as the docstring of a dataclass that has none.
        if not part.__doc__ or part.__doc__.startswith(f"{part.__name__}("):
            yield f"{part.__name__} has no docstring"


def mutable(classes: Iterable[type[Spec]]) -> Violations:
    for part in classes:
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
    assert list(mutable(specs())) == []


@dataclass(frozen=True, slots=True)
class Good(Spec):
    """A part without errors."""

    kind = "good"


@dataclass(frozen=True, slots=True)
class Duplicate(Spec):
    """A part with the kind of another one."""

    kind = "good"


@dataclass(frozen=True, slots=True)
class Undocumented(Spec):
    kind = "undocumented"


@dataclass
class Mutable(Spec):
    """A part that is neither frozen nor slotted."""

    kind = "mutable"


def test_errors_in_example_specs_are_found() -> None:
    assert list(uncatalogued([Good], {Spec: (Good,)})) == []
    assert list(uncatalogued([Good], {Spec: ()}))
    assert list(uncatalogued([], {Spec: (Good,)}))
    assert list(uncatalogued([Good], {Spec: (Good, Good)}))
    assert list(uncatalogued([Good, Duplicate], {Spec: (Good, Duplicate)})) == ["two parts of kind 'good'"]
    assert list(disordered(Spec, (Duplicate, Good))) == []
    assert list(disordered(Spec, (Good, Duplicate)))
    assert list(disordered(Spec, (Good, Undocumented))) == ["Undocumented has no docstring"]
    assert list(mutable([Good])) == []
    assert list(mutable([Mutable])) == ["Mutable is not frozen", "Mutable has no slots"]
