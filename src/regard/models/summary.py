"""Summarise a model as a tree of its modules with parameter counts."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

WIDTH = 80
LABEL = 20  # maximum length of the numbers of equal modules


def summary(model: nn.Module) -> str:
    """Return a tree of all modules that have parameters, with one line for equal modules of a list.

    The number in a line is the parameter count of the module, including its submodules. A line with "6 x" stands for
    six equal modules and has the parameter count of one of them. Tied tables and shared blocks are counted once.
    """
    lines = [(type(model).__name__, _size(model)), *_inside(model, "  ")]
    return "\n".join(f"{text:<{WIDTH - 16}}{size:>16,}" for text, size in lines)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if _size(child)]


def _inside(module: nn.Module, indent: str) -> Iterator[tuple[str, int]]:
    """Yield the text and the parameter count of each line for the contents of a module."""
    for name, parameter in module.named_parameters(recurse=False):
        yield f"{indent}{name}: {_shape(parameter)}", parameter.numel()
    groups: dict[tuple[Any, ...], list[str]] = {}  # names of equal entries of a list; other modules are on their own
    for name, child in _children(module):
        groups.setdefault((name.isdecimal() or name, *_part(child, indent)), []).append(name)
    for (_, path, kind, size, lines), names in groups.items():
        text = ", ".join(filter(None, (kind, f"{len(names)} x" if len(names) > 1 else "")))
        yield f"{indent}{_label(names)}{path}{': ' if text else ''}{text}", size
        yield from lines


def _label(names: list[str]) -> str:
    """Return the names of equal modules with ranges of numbers: `0-2,4-6`, or `0-2,...` if that would be long."""
    ranges: list[list[str]] = []
    for name in names:
        if ranges and name.isdecimal() and int(name) == int(ranges[-1][-1]) + 1:
            ranges[-1] = [ranges[-1][0], name]
        else:
            ranges.append([name])
    label = ",".join("-".join(each) for each in ranges)
    return label if len(label) <= LABEL else f"{'-'.join(ranges[0])},..."


def _part(module: nn.Module, indent: str) -> tuple[str, str, int, tuple[tuple[str, int], ...]]:
    """Return path, class, parameter count and content lines of `module`. An only submodule replaces its parent."""
    path, size = "", _size(module)
    while len(children := _children(module)) == 1 and not [*module.parameters(recurse=False)]:
        path, module = f"{path}.{children[0][0]}", children[0][1]
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return path, "", size, tuple(_inside(module, indent + "  "))
    kind = type(module).__name__.removesuffix("Module")
    shapes = sorted(module.parameters(), key=lambda parameter: -parameter.dim())
    if sum(parameter.dim() > 1 for parameter in shapes) <= 1:
        return path, f"{kind} {_shape(shapes[0])}", size, ()
    return path, kind, size, tuple(_inside(module, indent + "  "))


def _shape(parameter: Tensor) -> str:
    return " x ".join(map(str, parameter.shape))
