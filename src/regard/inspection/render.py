"""Heat maps of attention weights for a terminal or as PNG files. Rows are queries (T), columns are keys (S)."""

import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from rich.cells import cell_len, set_cell_size
from torch import Tensor

from regard.errors import DataError, SpecError
from regard.files import temporary

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
    matrix, low, high = _matrix(weights, rows, columns)
    sides = [_fit(readable(row), width // 3) for row in rows]
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
    for entry in (_fit(entry, width) for entry in entries):
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


def png(
    weights: Weights, rows: Sequence[str], columns: Sequence[str], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Write a heat map with a colour bar to the PNG file `path` atomically. This needs matplotlib."""
    try:
        # matplotlib is an optional dependency. Without pyplot, figures have no global state and no window.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise SpecError("", "a PNG needs the package matplotlib: pip install 'regard[demo]'") from None
    matrix, low, high = _matrix(weights, rows, columns)
    # The width and height of a cell in inches. No image is larger than about 40 inches.
    across, down = (min(0.3, 40 / len(labels)) for labels in (columns, rows))
    figure = Figure(figsize=(2 + across * len(columns), 1 + down * len(rows)), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(
        matrix, cmap="Blues", vmin=low, vmax=high if high > low else 1.0, aspect="auto", interpolation="nearest"
    )
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.03, label="attention weight").outline.set_visible(False)
    for count, axis in ((len(columns), axes.xaxis), (len(rows), axes.yaxis)):
        axis.set_ticks(np.arange(count - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=min(1.5, 5 * min(across, down)))
    axes.spines[:].set_visible(False)
    families, known = _fonts("".join((*rows, *columns, title)))
    plain: dict[str, Any] = {"fontfamily": families, "parse_math": False, "usetex": False}
    labels = [[_fit(readable(text, known), 40) for text in texts] for texts in (columns, rows)]
    sizes = [min(9.0, 72 * 0.7 * cell) for cell in (across, down)]
    axes.set_xticks(range(len(columns)), labels[0], rotation=90, fontsize=sizes[0], **plain)
    axes.set_yticks(range(len(rows)), labels[1], fontsize=sizes[1], **plain)
    axes.xaxis.tick_top()
    axes.tick_params(which="both", length=0)
    axes.set_title(readable(title, known), fontsize=11, pad=10, **plain)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    path = Path(path)
    making = temporary(path)
    try:
        try:
            making.write_bytes(buffer.getvalue())
            making.replace(path)
        finally:
            making.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from None


def _fonts(text: str) -> tuple[list[str], Callable[[str], bool]]:
    """Return font families for a text, and a function that returns True for the characters in these fonts.

    The caller writes all other characters as escape codes, because matplotlib would warn and draw a box for each.
    """
    from matplotlib import font_manager, get_data_path  # noqa: PLC0415  # an extra

    def characters(family: str) -> set[int]:
        # A family can have several files: select the one that matplotlib will draw with.
        path = font_manager.findfont(font_manager.FontProperties(family=[family]))
        return set(font_manager.get_font(path).get_charmap())

    def usable(font: font_manager.FontEntry) -> bool:
        # The other fonts of matplotlib are for formulas and placeholders.
        return font.style == "normal" and font.weight == 400 and not font.fname.startswith(get_data_path())

    families = ["DejaVu Sans"]  # comes with matplotlib
    known = characters(families[0])
    missing = {ord(character) for character in text if character.isprintable()} - known
    for family in sorted({font.name for font in font_manager.fontManager.ttflist if usable(font)}):
        if missing & (added := characters(family) if missing else set()):
            families.append(family)
            known |= added
            missing -= added
    return families, lambda character: ord(character) in known


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


def _fit(text: str, cells: int) -> str:
    """Return a text, truncated with an ellipsis if it is wider than `cells`."""
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + ELLIPSIS


def _matrix(
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
