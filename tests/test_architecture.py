"""Who may import whom, and what a file may hold: the rules that keep a new variant to one file and one line."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import regard
from regard import catalogue, recipe
from regard.nn import operators
from regard.tree import Spec

ROOT = Path(regard.__path__[0])
SLOTS = catalogue.SLOTS | recipe.SLOTS
# What stands in no slot: the whole of a recipe, and what is said for one search.
ALONE = {"Recipe", "Limits"}
FILES = {
    ".".join(("regard", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

# Each layer may import itself and the layers before it. `data` stands beside the models and knows none of them.
LAYERS = (
    ("errors", "files", "processes", "tree", "batch"),
    ("nn",),
    ("models",),
    ("catalogue", "cost", "presets", "variants"),
    ("training", "decoding", "engines"),
    ("convert", "defaults", "evaluation", "inspection", "recipe", "testing"),
    ("run",),
    ("serving", "session", "threads", "workers"),
    ("demo",),
    ("ablation", "bench"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names} | {"data": 1}


class Imports(ast.NodeVisitor):
    """The modules of regard that a file imports when it runs; what only type checkers read does not count."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute"
        module = node.module or ""
        # `from regard.nn import kernels` imports a module, `from regard.nn.kernels import attend` a name of one.
        self.found.update(f"{module}.{a.name}" if f"{module}.{a.name}" in FILES else module for a in node.names)


def imports(name: str) -> set[str]:
    visitor = Imports()
    visitor.visit(TREES[name])
    return visitor.found


def ours(name: str) -> set[str]:
    return {module for module in imports(name) if module.split(".")[0] == "regard"}


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@pytest.mark.parametrize("name", [name for name in FILES if layer(name)])
def test_imports_go_down(name: str) -> None:
    here = layer(name)
    assert here in RANK, f"{name}: say in LAYERS what {here!r} may import"
    for module in ours(name):
        there = layer(module)
        assert there or here == "cli", f"{name} imports regard itself: name the module that has what it needs"
        if here == "data":
            assert there in {"data", "batch", "tree", "errors", "files"}, (
                f"{name} imports {module}: data knows no models"
            )
        else:
            assert RANK.get(there, 0) <= RANK[here], f"{name} imports {module}, which stands above it"


def test_the_package_itself_imports_nothing() -> None:
    assert not ours("regard")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("errors", set()),
        ("tree", {"regard.errors"}),
        ("batch", {"regard.errors"}),
        ("nn.sight", {"regard.errors", "regard.tree"}),
        ("nn.mask", {"regard.nn.sight"}),
        ("nn.beams", set()),
        ("nn.state", {"regard.errors", "regard.nn.beams", "regard.nn.mask"}),
        ("nn.core", {"regard.errors", "regard.nn.mask", "regard.nn.state"}),
    ],
)
def test_the_words_that_all_share_know_no_part(name: str, allowed: set[str]) -> None:
    assert ours(f"regard.{name}") <= allowed


@pytest.mark.parametrize("folder", ["branches", "position", "stacks", "vocab"])
def test_siblings_share_only_their_base(folder: str) -> None:
    """One exception: experts may build feed-forwards. (In vocab, heads are handed tables.)"""
    prefix = f"regard.nn.{folder}."
    allowed = {f"{prefix}base"} | ({f"{prefix}tables"} if folder == "vocab" else set())
    for name in FILES:
        if not name.startswith(prefix) or name == f"{prefix}experts":
            continue
        siblings = {module for module in ours(name) if module.startswith(prefix)}
        assert siblings <= allowed, f"{name} imports {siblings - allowed}: move what they share to {prefix}base"


def test_training_and_decoding_know_no_family() -> None:
    for name in FILES:
        if layer(name) in {"training", "decoding"}:
            families = {module for module in ours(name) if layer(module) == "models"} - {"regard.models.base"}
            assert not families, name


def test_only_one_file_knows_about_ranks() -> None:
    for name in FILES:
        if name != "regard.training.parallel":
            assert not any(module.startswith("torch.distributed") for module in imports(name)), name


def names(tree: ast.AST) -> Iterator[str]:
    """Every name and attribute that is used or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.name.split(".")[-1] for alias in node.names)


KERNELS = {"scaled_dot_product_attention", "flex_attention", "varlen_attn", "MultiheadAttention"}


def test_one_door_to_attention_kernels() -> None:
    for name, tree in TREES.items():
        used = KERNELS & set(names(tree))
        assert name == "regard.nn.kernels" or not used, f"{name} calls {used} itself"


def test_torch_compile_is_told_of_every_operator() -> None:
    declared = [
        ast.literal_eval(decorator.args[0])
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(("operator", "custom_op"))
    ]
    assert sorted(declared) == sorted(f"regard::{name}" for name in operators.NAMES)


def test_only_the_command_line_prints() -> None:
    for name, tree in TREES.items():
        prints = any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            for node in ast.walk(tree)
        )
        assert layer(name) == "cli" or not prints, f"{name} prints"


def test_one_place_starts_python() -> None:
    """So that no process imports from the working folder: neither `python -m`, nor what multiprocessing spawns."""
    for name, tree in TREES.items():
        assert name == "regard.processes" or "executable" not in names(tree), f"{name}: use regard.processes.python"
        assert "multiprocessing" not in names(tree), f"{name}: use regard.processes.python"


def test_files_are_named_for_a_concept() -> None:
    for name, path in FILES.items():
        assert path.stem not in {"utils", "util", "common", "helpers", "helper", "misc"}, name


KERNELS = {
    "regard.nn.chance",
    "regard.nn.segments",
    "regard.nn.layer_norm",
    "regard.nn.linear_relu",
}  # need Triton, and hold no specs


def specs() -> list[type[Spec]]:
    """Every spec class of the package that describes something: a dataclass with a kind."""
    for module in pkgutil.walk_packages(regard.__path__, "regard."):
        if not module.name.endswith("__main__") and module.name not in KERNELS:
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


def test_every_spec_is_in_the_catalogue_once() -> None:
    catalogued = [part for parts in SLOTS.values() for part in parts]
    assert len(catalogued) == len(set(catalogued))
    assert {part.__qualname__ for part in specs()} - ALONE == {part.__qualname__ for part in catalogued}
    kinds = [part.kind for part in catalogued]
    assert len(kinds) == len(set(kinds)), "two parts of one kind"


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.__name__)
def test_slots_are_sorted_and_their_parts_documented(slot: type[Spec]) -> None:
    parts = [part.__name__ for part in SLOTS[slot]]
    assert parts == sorted(parts, key=str.lower) or parts == sorted(parts), "keep the catalogue in alphabetical order"
    for part in (slot, *SLOTS[slot]):
        # A dataclass without a docstring is given its signature as one.
        assert part.__doc__, f"{part.__name__} has no docstring"
        assert not part.__doc__.startswith(f"{part.__name__}("), f"{part.__name__} has no docstring"


def test_specs_are_frozen_and_slotted() -> None:
    for part in specs():
        assert part.__dataclass_params__.frozen, part  # type: ignore[reportAttributeAccessIssue]
        assert "__slots__" in vars(part), part
