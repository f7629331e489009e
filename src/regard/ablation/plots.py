"""Plots for ablations and ladders: SVG drawn by matplotlib, with colours from the style sheet of the page."""

import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from regard.ablation.statistics import BETTER, WORSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = '<p>Pictures need matplotlib: run <code>pip install "regard[plot]"</code>, then the same command again.</p>'
WIDTH = 9.6  # inches
# Placeholder colours, replaced by variables of the style sheet, whose values differ between light and dark screens.
INK, SOFT, LINE, GROUND = "#010101", "#020202", "#030303", "#040404"
COLOURS = {"better": "#050505", "worse": "#060606", "base": "#070707", "": SOFT}
VARIABLES = {INK: "ink", SOFT: "soft", LINE: "line", GROUND: "ground"}
VARIABLES |= {COLOURS[name]: name for name in ("better", "worse", "base")}
ENDS = ("effect", "low", "high")
LARGEST, SMALLEST = 1e30, 1e-30  # larger numbers are drawn as unknown, smaller ones as 0


def kind(row: dict[str, Any]) -> str:
    """Return the CSS class of a table row: `better`, `worse`, `base`, or an empty string."""
    kinds = {BETTER: "better", WORSE: "worse", "the base": "base", "the full Transformer": "base"}
    return kinds.get(row["verdict"], "")


def effects(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG plot of the effects of all modifications with intervals, best first. Lower effects are better."""
    known = [row for row in rows if row["effect"] and all(_known(row["effect"][name]) for name in ENDS)]
    known = sorted(known, key=lambda row: row["effect"]["effect"])
    if not known:
        return "<p>No row has an effect yet.</p>"
    # The scale fits the median row, so that one row that failed to learn does not compress all others.
    ends = sorted(max(abs(row["effect"]["low"]), abs(row["effect"]["high"])) for row in known)
    most = min(ends[-1], 4 * ends[len(ends) // 2])
    most = 1.05 * most if most > SMALLEST else 1.0
    figure, axes = new_figure(0.26 * len(known) + 0.9)
    axes.set_xlim(-most, most)
    axes.axvline(0.0, color=SOFT, linestyle="--", linewidth=1)
    names = []
    for i, row in enumerate(known):
        effect, low, high = (min(max(row["effect"][name], -most), most) for name in ENDS)
        colour = COLOURS[kind(row)]
        axes.plot([low, high], [i, i], color=colour, linewidth=1.6)
        # Filled if a difference was measured, hollow if not, so that colour is not the only sign.
        axes.plot([effect], [i], "o", color=colour, markerfacecolor=colour if kind(row) else GROUND, markersize=5)
        outside = abs(row["effect"]["effect"]) > most
        names.append(row["name"] + (f" ({row['effect']['effect']:+.2f})" if outside else ""))
    _names(axes, names)
    axes.set_xlabel("better  ←  difference of the final validation loss from the base, nats per token  →  worse")
    return to_svg(figure, "Effect of every row on the final validation loss, with its interval")


def curves(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG plot of validation loss by training step, averaged over seeds. The thick line is the base model."""
    drawable = [row | {"curve": [point for point in row["curve"] if _known(point[1])]} for row in rows]
    known = [row for row in drawable if len(row["curve"]) > 1]
    if not known:
        return "<p>No run has a curve yet.</p>"
    figure, axes = new_figure(4.4)
    axes.set_ylim(*_range(*([row["curve"][i][1] for row in known] for i in (0, -1))))
    _lines(axes, known)
    axes.set_xlabel("training steps")
    axes.set_ylabel("validation loss, nats per token")
    return to_svg(figure, "Validation loss by training step, mean of the seeds of each row")


def bars(rows: Sequence[dict[str, Any]], metric: str) -> str:
    """Return an SVG bar plot of the metric of every model of a ladder, with intervals, in the order of the ladder."""
    known = [row for row in rows if all(_known(row[name]) for name in ("metric", "low", "high"))]
    if not known:
        return "<p>No rung has a score yet.</p>"
    figure, axes = new_figure(0.3 * len(known) + 0.9)
    for i, row in enumerate(known):
        axes.barh(i, row["metric"], height=0.62, color=COLOURS["base"] if kind(row) == "base" else LINE)
        axes.plot([row["low"], row["high"]], [i, i], color=SOFT, linewidth=1.6)
        text = f"{row['metric']:.1f}  ({row['low']:.1f} to {row['high']:.1f})"
        axes.annotate(
            text, (max(row["high"], row["metric"]), i), (6, 0), textcoords="offset points", va="center", color=INK
        )
    axes.set_xlim(0.0, 1.25 * _most([max(row["high"], row["metric"]) for row in known]))
    _names(axes, [row["name"] for row in known])
    axes.set_xlabel(f"{metric}, with the interval of 95%")
    return to_svg(figure, f"{metric} of every rung with its interval")


def lengths(rows: Sequence[dict[str, Any]], names: Sequence[str], metric: str) -> str:
    """Return an SVG plot of the metric by source length, one line per model. The thick line is the full Transformer."""
    points = [
        [(i, bucket["value"]) for i, bucket in enumerate(row["buckets"]) if bucket["lines"] and _known(bucket["value"])]
        for row in rows
    ]
    known = [row | {"curve": curve} for row, curve in zip(rows, points, strict=True) if curve]
    if not known or len(names) < 2:
        return "<p>All sources have the same length.</p>"
    figure, axes = new_figure(4.4)
    axes.set_ylim(0.0, 1.05 * _most([value for row in known for _, value in row["curve"]]))
    _lines(axes, known)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("source tokens")
    axes.set_ylabel(metric)
    return to_svg(figure, f"{metric} by source length")


def new_figure(height: float) -> tuple["Figure", "Axes"]:
    """Return an empty figure of the width of a page, and its axes."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # optional

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _names(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _lines(axes: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    """Draw one labelled curve per model. With over 24 models, label only the base and models that clearly differ."""
    low, high = axes.get_ylim()
    for row in sorted(rows, key=lambda row: (kind(row) == "base", bool(kind(row)))):
        thick = kind(row) == "base"
        steps, values = zip(*row["curve"], strict=True)
        drawn = [min(max(value, low), high) for value in values]
        axes.plot(steps, drawn, color=COLOURS[kind(row)], linewidth=2.6 if thick else 1.2, alpha=1 if thick else 0.7)
    named = sorted((row for row in rows if len(rows) <= 24 or kind(row)), key=lambda row: row["curve"][-1][1])[:24]
    ends = [(min(max(row["curve"][-1][1], low), high) - low) / (high - low) for row in named]
    for row, end, place in zip(named, ends, _apart(ends, 0.045), strict=True):
        colour = COLOURS[kind(row)] if kind(row) else INK
        label, line = (1.04, place), {"arrowstyle": "-", "color": LINE, "linewidth": 0.8, "relpos": (0, 0.5)}
        axes.annotate(row["name"], (1.0, end), label, "axes fraction", "axes fraction", line, color=colour, va="center")
    last = max(row["curve"][-1][0] for row in rows)
    axes.set_xlim(min(row["curve"][0][0] for row in rows), last or 1)


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending label positions in 0 .. 1 so that neighbours are at least `gap` apart, and return them."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap if moved else 0.0))
    for i in range(len(moved) - 1, -1, -1):
        moved[i] = min(moved[i], 1.0 - gap * (len(moved) - 1 - i))
    return moved


def to_svg(figure: "Figure", title: str) -> str:
    """Return a figure as SVG with the colours of the style sheet; `title` describes it to screen readers."""
    import matplotlib as mpl  # noqa: PLC0415  # optional

    for axes in figure.axes:
        axes.tick_params(color=LINE, labelcolor=INK, length=0)
        axes.grid(axis="x", color=LINE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.xaxis.label.set_color(SOFT)
        axes.yaxis.label.set_color(SOFT)
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}
    with mpl.rc_context(settings), io.StringIO() as file:
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
        drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    for colour, variable in VARIABLES.items():
        drawn = drawn.replace(colour, f"var(--{variable})")
    return drawn.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _known(value: float | None) -> bool:
    return value is not None and abs(value) <= LARGEST  # False for NaN


def _most(values: Sequence[float]) -> float:
    """Return the upper end of an axis that starts at 0: the largest value, or 1 if no value is above 0."""
    most = max(values)
    return most if most > SMALLEST else 1.0


def _range(starts: Sequence[float], finals: Sequence[float]) -> tuple[float, float]:
    """Return the range of losses to draw: from the best final loss to the median starting loss.

    If losses rise, the range extends to the median final loss. If losses do not change, the range is a small interval
    around them.
    """
    middle = sorted(starts)[len(starts) // 2]
    low, high = min(*finals, middle), max(middle, sorted(finals)[len(finals) // 2])
    size = max(abs(low), abs(high))
    size = size if size > SMALLEST else 0.0
    margin = 0.05 * (high - low) if high - low > 1e-6 * size else 0.05 * size
    margin = margin if margin > SMALLEST else 1.0
    return low - margin, high + margin
