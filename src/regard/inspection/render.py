"""Heat maps of attention weights for a terminal. Rows are queries (T), columns are keys (S)."""

import unicodedata
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from rich.cells import cell_len, set_cell_size
from torch import Tensor

from regard.errors import DataError, SpecError

SHADES = " \u2591\u2592\u2593\u2588"
ELLIPSIS = "\u2026"
NARROWEST = 24

Weights = Float[Tensor, "T S"] | Float[np.ndarray, "T S"]


def terminal(weights: Weights, rows: Sequence[str], columns: Sequence[str], width: int = 100) -> str:
    """Return a heat map for a terminal, at most `width` characters wide.

    The shades range from 0, or from the lowest weight if it is negative, to the highest weight. If the column labels
    fit, each is above its column. Otherwise the columns are numbered, a legend maps the numbers to labels, and the
    columns are divided into several panels if necessary.
    """
    if width < NARROWEST:
        raise SpecError("width", f"must be at least {NARROWEST} cells, not {width}")
    matrix, low, high = checked(weights, rows, columns)
    sides = [fit(readable(row), width // 3) for row in rows]
    heads = [readable(column) for column in columns]
    steps, names = len(SHADES) - 1, ("blank", *SHADES[1:])
    span = high - low
    levels = np.rint((matrix - low) / span * steps).astype(int) if span else np.zeros(matrix.shape, int)
    shades = [[SHADES[level] for level in row] for row in levels]
    scale = [f"{name} {low + span * level / steps:.2g}" for level, name in enumerate(names)]
    side = max(map(cell_len, sides))
    wide = [max(2, cell_len(head)) for head in heads]
    if side + sum(2 + cells for cells in wide) <= width:
        lines = list(_panel(sides, heads, shades, wide, gap=2))
    else:
        lines = list(_numbered(sides, heads, shades, width))
    return "\n".join(line.rstrip() for line in [*lines, "", *_flow(scale, width)])


def _flow(entries: Sequence[str], width: int) -> Iterator[str]:
    """Arrange the entries, separated by spaces, in lines of at most `width` terminal cells, and yield the lines."""
    line = ""
    for entry in (fit(entry, width) for entry in entries):
        if line and cell_len(line) + 3 + cell_len(entry) > width:
            yield line
            line = ""
        line = f"{line}   {entry}" if line else entry
    yield line


def _panel(sides: list[str], heads: list[str], shades: list[list[str]], wide: Sequence[int], gap: int) -> Iterator[str]:
    """Yield a line of column labels, then one line per matrix row: its label and its cells.

    Each cell repeats its shade at most 3 times, and is padded to the width of its column (`wide`).
    """
    side, space = max(map(cell_len, sides)), " " * gap
    yield " " * side + "".join(space + set_cell_size(head, cells) for head, cells in zip(heads, wide, strict=True))
    for label, row in zip(sides, shades, strict=True):
        cells = (space + set_cell_size(shade * min(3, n), n) for shade, n in zip(row, wide, strict=True))
        yield " " * (side - cell_len(label)) + label + "".join(cells)


def _numbered(sides: list[str], heads: list[str], shades: list[list[str]], width: int) -> Iterator[str]:
    """Yield the lines of panels with numbered columns, then the lines of the legend."""
    cells = max(2, len(str(len(heads))))
    fitting = max(1, (width - max(map(cell_len, sides))) // (cells + 1))
    for start in range(0, len(heads), fitting):
        here = slice(start, start + fitting)
        numbers = [str(number + 1).rjust(cells) for number in range(len(heads))[here]]
        yield from _panel(sides, numbers, [row[here] for row in shades], [cells] * len(numbers), gap=1)
        yield ""
    yield from _flow([f"{number} {head}" for number, head in enumerate(heads, start=1)], width)


def readable(label: str, known: Callable[[str], bool] = str.isprintable) -> str:
    """Return a label in which escape codes replace the characters that cannot be drawn.

    A combining mark at the beginning is written on a dotted circle.
    """
    text = "".join(
        each if each.isprintable() and known(each) else each.encode("unicode_escape").decode("ascii") for each in label
    )
    if not unicodedata.category(text[:1] or " ").startswith("M"):
        return text
    return ("\u25cc" if known("\u25cc") else " ") + text


def fit(text: str, cells: int) -> str:
    """Return a text, truncated with an ellipsis if it is wider than `cells`."""
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + ELLIPSIS


def checked(
    weights: Tensor | np.ndarray, rows: Sequence[str], columns: Sequence[str]
) -> tuple[Float[np.ndarray, "T S"], float, float]:
    """Return the checked weights, min(0, lowest weight), and max(0, highest weight)."""
    tensor = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    if tensor.dim() != 2 or not tensor.numel():
        raise DataError(f"weights: needs queries by keys (T, S), not {tuple(tensor.shape)}; choose one head of one row")
    if tuple(tensor.shape) != (len(rows), len(columns)):
        raise DataError(f"weights: {tuple(tensor.shape)} does not fit {len(rows)} row and {len(columns)} column labels")
    if not bool(torch.isfinite(tensor).all()):
        raise DataError("weights: some are not finite and cannot be drawn")
    return tensor.numpy(), min(0.0, float(tensor.min())), max(0.0, float(tensor.max()))
