"""Summarise a model as a tree of its modules with parameter counts."""

from collections.abc import Iterator
from itertools import groupby

from torch import Tensor, nn

WIDTH = 80


def summary(model: nn.Module) -> str:
    """Return a tree of all modules that have parameters, with one line for equal neighbouring modules.

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
    parts = [(name, *_part(child, indent)) for name, child in _children(module)]
    for (_, path, kind, size, lines), group in groupby(parts, lambda part: (part[0].isdecimal() or part[0], *part[1:])):
        names = [name for name, *_ in group]
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        text = ", ".join(filter(None, (kind, f"{len(names)} x" if len(names) > 1 else "")))
        yield f"{indent}{label}{path}{': ' if text else ''}{text}", size
        yield from lines


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
