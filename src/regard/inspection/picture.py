"""Heat maps of attention weights as PNG or SVG files: one matrix with its labels, or a grid of layers and heads."""

import os
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import DataError, SpecError
from regard.files import temporary
from regard.inspection.render import Weights, checked, fit, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
LARGEST = 40.0  # inches; no picture is much wider or higher
PANEL = 1.6  # inches; width and height of a matrix in a grid
SHORT, LONG = 8, 40  # characters of a label; longer ones are cut
FEW = 24  # labels; a grid has the labels of tokens only up to this number
PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}

Labels = Sequence[str]


def heat_map(weights: Weights, rows: Labels, columns: Labels, path: str | os.PathLike[str], title: str = "") -> None:
    """Write a heat map with a colour bar to a PNG or SVG file, atomically. This needs matplotlib."""
    path = checked_path(path)
    matrix, low, high = checked(weights, rows, columns)
    # The width and height of a cell in inches.
    across, down = (min(0.3, LARGEST / len(labels)) for labels in (columns, rows))
    figure = _figure(2 + across * len(columns), 1 + down * len(rows))
    axes: Axes = figure.subplots()
    image = axes.imshow(
        matrix, cmap="Blues", vmin=low, vmax=high if high > low else 1.0, aspect="auto", interpolation="nearest"
    )
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.03, label="attention weight").outline.set_visible(False)
    for count, axis in ((len(columns), axes.xaxis), (len(rows), axes.yaxis)):
        axis.set_ticks(np.arange(count - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=min(1.5, 5 * min(across, down)))
    axes.spines[:].set_visible(False)
    families, known = _fonts("".join((*rows, *columns, title)))
    sizes = [min(9.0, 72 * 0.7 * cell) for cell in (across, down)]
    _label(axes, rows, columns, sizes, families, known)
    axes.set_title(readable(title, known), fontsize=11, pad=10, fontfamily=families, **PLAIN)
    _write(figure, path)


def grid(
    panels: Sequence[Sequence[tuple[str, Weights, Labels, Labels]]], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Write a grid of heat maps, such as one row per layer and one column per head, to a PNG or SVG file.

    A panel is (title, weights, row labels, column labels). All panels have the same scale of colours. The first panel
    of each row has the labels of its queries and keys, if they are few enough to be read.
    """
    path = checked_path(path)
    matrices = [[checked(weights, rows, columns) for _, weights, rows, columns in line] for line in panels]
    high = max(high for line in matrices for _, _, high in line) or 1.0
    height, width = len(panels), max(map(len, panels))
    size = min(PANEL, LARGEST / max(height, width))
    figure = _figure(2 + size * width, 1 + 1.2 * size * height)
    every: Any = figure.subplots(height, width, squeeze=False, gridspec_kw={"hspace": 0.45, "wspace": 0.1})
    families, known = _fonts("".join(label for line in panels for _, _, r, c in line for label in (*r, *c)) + title)
    for axes in every.flat:
        axes.set_axis_off()
    for i, line in enumerate(panels):
        for j, (name, _, rows, columns) in enumerate(line):
            axes = every[i, j]
            axes.set_axis_on()
            axes.imshow(matrices[i][j][0], cmap="Blues", vmin=0.0, vmax=high, aspect="auto", interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            if j == 0 and max(len(rows), len(columns)) <= FEW:
                sizes = [min(7.0, 72 * 0.8 * size / len(labels)) for labels in (columns, rows)]
                _label(axes, rows, columns, sizes, families, known, below=True)
            axes.set_title(name, fontsize=7, pad=2)
    figure.suptitle(readable(title, known), fontsize=11, fontfamily=families, **PLAIN)
    _write(figure, path)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture; raise an error if its suffix is not that of a supported format."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise SpecError("out", f"{path}: a picture is a {' or '.join(FORMATS)} file; give such a name")
    return path


def _figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches."""
    try:
        # matplotlib is an optional dependency. Without pyplot, figures have no global state and no window.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise SpecError("", "a picture needs the package matplotlib: pip install 'regard[plot]'") from None
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    return figure


def _label(
    axes: "Axes",
    rows: Labels,
    columns: Labels,
    sizes: Sequence[float],
    families: list[str],
    known: Callable[[str], bool],
    below: bool = False,
) -> None:
    """Write the labels of rows and columns, with font sizes `sizes` (columns, rows).

    Column labels are above the matrix or, if `below` is true, below it. In a grid they are below, and are kept short
    because of the next matrix.
    """
    labels = [[fit(readable(text, known), SHORT if below else LONG) for text in texts] for texts in (columns, rows)]
    axes.set_xticks(range(len(columns)), labels[0], rotation=90, fontsize=sizes[0], fontfamily=families, **PLAIN)
    axes.set_yticks(range(len(rows)), labels[1], fontsize=sizes[1], fontfamily=families, **PLAIN)
    if not below:
        axes.xaxis.tick_top()
    axes.tick_params(which="both", length=0)


def _write(figure: "Figure", path: Path) -> None:
    """Write a figure to a file atomically, in the format of its suffix."""
    import matplotlib as mpl  # noqa: PLC0415  # an extra

    form, buffer = path.suffix.lower()[1:], BytesIO()
    fixed: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "regard"}  # text stays text; no random ids
    with mpl.rc_context(fixed):
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(buffer, format=form, bbox_inches="tight", metadata=metadata)
    write_picture(path, buffer.getvalue())


def write_picture(path: Path, content: bytes) -> None:
    """Write the file of a picture atomically; raise DataError if that fails."""
    making = temporary(path)
    try:
        try:
            making.write_bytes(content)
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
