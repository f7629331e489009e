"""The plot of a length benchmark: time and memory by sequence length, and accuracy by distance."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg", ".pdf")
MARKERS = "osv^D<>PX*hd"
LINES = ("-", "--", ":", "-.")
Points = Mapping[str, Sequence[tuple[float, float]]]


def check_plot(path: Path) -> None:
    """Raise an error if a plot cannot be saved under this file name."""
    if path.suffix not in ENDINGS:
        raise SpecError("--plot", f"must end with {', '.join(ENDINGS)}, not with {path.suffix!r}")
    if not path.parent.is_dir():
        raise SpecError("--plot", f"{path.parent} is not a folder; create it, or name another")
    if find_spec("matplotlib") is None:
        raise SpecError("--plot", 'needs matplotlib; run pip install "regard[plot]"')


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Plot a `LengthReport`, given as a JSON object, and save the plot. Lengths and distances have logarithmic axes."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # optional

    recall = record["recall"]
    titles = {row["name"]: row["title"] for row in (*record["rows"], *(recall["rows"] if recall else ()))}
    names = list(titles)
    costs = [("seconds", "seconds per training step", 1.0), ("peak_bytes", "peak memory of a training step, MB", 1e6)]
    costs = costs if record["rows"] else []
    count = len(costs) + bool(recall)
    figure = Figure(figsize=(3.0 + 4.0 * count, 5.4), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes, (field, label, unit) in zip(panels, costs, strict=False):
        _curves(axes, names, by_length(record, field, unit))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted({row["length"] for row in record["rows"]}))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.tick_params(axis="x", rotation=45)
        axes.set_xlabel("tokens in a sequence")
        axes.set_ylabel(label)
        axes.axvline(record["fitted_from"], color="0.6", linewidth=1, linestyle=":")
    if recall:
        accuracy = {name: [(float(d), a) for d, a in values.items()] for name, values in record["accuracy"].items()}
        _curves(panels[-1], names, accuracy)
        panels[-1].axhline(recall["chance"], color="0.6", linewidth=1, linestyle=":")
        panels[-1].set_xscale("log", base=2)
        panels[-1].xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        panels[-1].set_ylim(0.0, 1.03)
        panels[-1].set_xlabel("tokens since the key and its value")
        panels[-1].set_ylabel("accuracy of associative recall (dotted: guessing)")
    lines = [_line(panels[0], i) for i in range(len(names))]
    legend = [_label(titles[name], record["exponents"].get(name, {})) for name in names]
    title = "model, with the exponents of time and of memory\nright of the dotted line" if costs else "model"
    figure.legend(lines, legend, loc="outside right center", frameon=False, title=title)
    figure.savefig(path, dpi=110)


def by_length(record: Mapping[str, Any], field: str, unit: float) -> Points:
    """Return the points (length, value) of every model, without lengths at which it was not measured."""
    points: dict[str, list[tuple[float, float]]] = {row["name"]: [] for row in record["rows"]}
    for row in record["rows"]:
        if row[field]:
            points[row["name"]].append((float(row["length"]), row[field] / unit))
    return points


def _curves(axes: "Axes", names: Sequence[str], points: Points) -> None:
    for i, name in enumerate(names):
        if points.get(name):
            x, y = zip(*points[name], strict=True)
            axes.plot(x, y, **_style(i))
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _style(number: int) -> dict[str, Any]:
    """Return the colour, marker and line of a model: no two models differ in colour alone."""
    return {
        "color": f"C{number % 10}",
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
        "linewidth": 1.4,
        "markersize": 5,
    }


def _line(axes: "Axes", number: int) -> Any:
    return axes.plot([], [], **_style(number))[0]


def _label(title: str, exponents: Mapping[str, float | None]) -> str:
    if not exponents:
        return title
    return f"{title} ({', '.join('-' if b is None else f'{b:.2f}' for b in exponents.values())})"
