"""Draw a value per attention head: one panel per kind of attention, with layers as rows and heads as columns."""

import os
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import DataError, SpecError
from regard.inspection.picture import write_picture

SUFFIXES = (".png", ".svg", ".pdf")


def write(values: Mapping[tuple[str, int, int], float], path: str | os.PathLike[str], title: str) -> None:
    """Write the values, keyed by (kind, layer, head), as a picture to `path` atomically. This needs matplotlib."""
    path = Path(path)
    check_path(path)
    try:
        # matplotlib is an optional dependency. Without pyplot, figures have no global state and no window.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise SpecError("--plot", "a picture needs the package matplotlib: pip install 'regard[demo]'") from None
    kinds = list(dict.fromkeys(kind for kind, _, _ in values))
    grids = [_grid(values, kind) for kind in kinds]
    widths = [grid.shape[1] for grid in grids]
    size = (1.5 + sum(0.6 * width + 0.8 for width in widths), 1.2 + 0.5 * max(grid.shape[0] for grid in grids))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(kinds), squeeze=False, width_ratios=widths)[0]
    top = max(np.nanmax(np.abs(grid)) for grid in grids) or 1.0
    image: Any = None
    for kind, grid, axes in zip(kinds, grids, panels, strict=True):
        image = axes.imshow(grid, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
        axes.set_title(kind, fontsize=10)
        axes.set_xticks(range(grid.shape[1]))
        axes.set_yticks(range(grid.shape[0]))
        axes.set_xlabel("head", fontsize=8)
        axes.tick_params(length=0, labelsize=8)
        for (layer, head), value in np.ndenumerate(grid):
            if np.isfinite(value):
                dark = abs(value) > 0.6 * top
                axes.text(head, layer, f"{value:.2g}", ha="center", va="center", fontsize=6, color="w" if dark else "k")
    panels[0].set_ylabel("layer", fontsize=8)
    figure.colorbar(image, ax=list(panels), fraction=0.03, label=title)
    _save(figure, path)


def check_path(path: Path) -> None:
    """Raise an error if no picture can be written to a file of this name."""
    if path.suffix not in SUFFIXES:
        raise SpecError("--plot", f"{path} must end in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise DataError(f"--plot: {path.parent} does not exist; create this folder first")


def _grid(values: Mapping[tuple[str, int, int], float], kind: str) -> np.ndarray:
    """Return the values of one kind as (layers, heads), with NaN for the heads that a layer lacks."""
    own = {(layer, head): value for (name, layer, head), value in values.items() if name == kind}
    grid = np.full((1 + max(layer for layer, _ in own), 1 + max(head for _, head in own)), np.nan)
    for at, value in own.items():
        grid[at] = value
    return grid


def _save(figure: Any, path: Path) -> None:
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix[1:])
    write_picture(path, buffer.getvalue())
