"""The page of an ablation: one HTML file that needs nothing else, light or dark, with pictures drawn here."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from regard.ablation.statistics import BETTER, WORSE
from regard.files import replace_text

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6570; --line: #d5dae0; --ground: #ffffff;
  --better: #17723b; --worse: #b3261e; --base: #1c5fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4af; --line: #3a424b; --ground: #14181c;
  --better: #5cc98a; --worse: #ff8a80; --base: #7db4ff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.judged th:last-child, .judged td:last-child { text-align: left; white-space: normal; min-width: 12rem; }
thead th { border-bottom: 2px solid var(--soft); }
.better { color: var(--better); } .worse { color: var(--worse); } .base { color: var(--base); }
svg { width: 100%; height: auto; max-width: 60rem; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .axis { stroke: var(--line); stroke-width: 1; } svg .zero { stroke: var(--soft); stroke-dasharray: 4 3; }
svg .mark { stroke: var(--soft); fill: var(--soft); stroke-width: 2; }
svg .mark.better { stroke: var(--better); fill: var(--better); }
svg .mark.worse { stroke: var(--worse); fill: var(--worse); }
svg .curve { fill: none; stroke: var(--soft); stroke-width: 1.4; opacity: .55; }
svg .curve.better { stroke: var(--better); } svg .curve.worse { stroke: var(--worse); }
svg .curve.base { stroke: var(--base); stroke-width: 3; opacity: 1; }
svg .bar { fill: var(--line); } svg .bar.base { fill: var(--base); opacity: .6; }
svg g:hover .curve { opacity: 1; stroke-width: 3; } svg .soft { fill: var(--soft); }
"""


ENDS = ("effect", "low", "high")
LARGEST = 1e100  # beyond it, a number is drawn as one that is not known


def save(path: Path, draw: Callable[[], str], say: Callable[[str], None]) -> None:
    """Write a page. What goes wrong is said: tables are there before it, and must not be lost with a picture."""
    try:
        replace_text(path, draw())
    except Exception as error:
        path.unlink(missing_ok=True)  # one of an earlier time would show other numbers than the table
        say(f"warning: {path} could not be drawn ({type(error).__name__}: {error}); the tables beside it are whole")


def html(record: dict[str, Any], cells: Sequence[Sequence[str]], sentences: Sequence[str]) -> str:
    """The whole page, from the JSON of a report, its table as text, and what is to be said of it."""
    rows = record["rows"]
    verdicts = [_class(row) for row in rows]
    parts = [
        "<h1>Ablation</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in sentences),
        _table(cells, verdicts),
        "<h2>Effects on the final loss</h2>",
        effects(rows),
        "<h2>Validation loss</h2>",
        curves(rows),
    ]
    return _whole("Ablation", parts)


def ladder(
    record: dict[str, Any],
    metric: str,
    cells: Sequence[Sequence[str]],
    by_length: Sequence[Sequence[str]],
    sentences: Sequence[str],
) -> str:
    """The page of a ladder, from its JSON, the name of its metric, its two tables as text, and what is to be said."""
    rows = record["rows"]
    parts = [
        "<h1>The ladder</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in sentences),
        _table(cells, [_class(row) for row in rows]),
        f"<h2>{escape(metric)}</h2>",
        bars(rows, metric),
        f"<h2>{escape(metric)} by source length</h2>",
        lengths(rows, [bucket["name"] for bucket in record["buckets"]], metric),
        _table(by_length),
        "<h2>Validation loss</h2>",
        curves(rows),
    ]
    return _whole("The ladder", parts)


def _whole(title: str, parts: Sequence[str]) -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{title}</title><style>{STYLE}</style></head>\n'
        f"<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _class(row: dict[str, Any]) -> str:
    known = {BETTER: "better", WORSE: "worse", "the base": "base", "the full Transformer": "base"}
    return known.get(row["verdict"], "")


def bars(rows: Sequence[dict[str, Any]], metric: str) -> str:
    """The metric of every rung, from the bottom of the ladder, with its interval."""
    known = [row for row in rows if all(_known(row[name]) for name in ("metric", "low", "high"))]
    if not known:
        return "<p>No rung has been climbed yet.</p>"
    left, right, each, top = 190.0, 880.0, 24.0, 16.0
    most = _most(max(row["high"], row["metric"]) for row in known)
    bottom = top + each * len(known)

    def x(value: float) -> float:
        return left + (right - left) * min(max(value, 0.0), most) / most

    drawn = [_axis(x, ticks(0.0, most), top, bottom)]
    for i, row in enumerate(known):
        y, kind = top + each * (i + 0.5), _class(row)
        told = f"{row['name']}: {row['metric']:.1f}, {row['low']:.1f} to {row['high']:.1f}"
        drawn.append(
            f"<g><title>{escape(told)}</title>"
            f'<text x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(row["name"])}</text>'
            f'<rect class="bar {kind}" x="{left}" y="{y - 8:.1f}" width="{x(row["metric"]) - left:.1f}" height="16"/>'
            f'<line class="mark" x1="{x(row["low"]):.1f}" x2="{x(row["high"]):.1f}" y1="{y:.1f}" y2="{y:.1f}"/></g>'
        )
    drawn.append(f'<text class="soft" x="{right}" y="{bottom + 34}" text-anchor="end">{escape(metric)}</text>')
    return _svg(900, bottom + 44, f"{metric} of every rung with its interval", drawn)


def lengths(rows: Sequence[dict[str, Any]], names: Sequence[str], metric: str) -> str:
    """The metric by source length, a line for every rung; the full Transformer is the thick one."""
    points = [
        [(i, one["value"]) for i, one in enumerate(row["buckets"]) if one["lines"] and _known(one["value"])]
        for row in rows
    ]
    known = [row | {"curve": curve} for row, curve in zip(rows, points, strict=True) if curve]
    if not known or len(names) < 2:
        return "<p>There are no lengths to tell apart.</p>"
    left, right, top, bottom = 60.0, 760.0, 16.0, 380.0
    most = _most(value for row in known for _, value in row["curve"])

    def x(bucket: float | int) -> float:
        return left + (right - left) * (bucket + 0.5) / len(names)

    def y(value: float) -> float:
        return bottom - (bottom - top) * min(max(value, 0.0), most) / most

    drawn = [_left_axis(y, ticks(0.0, most), left, right)]
    drawn += [
        f'<text class="soft" x="{x(i):.1f}" y="{bottom + 17}" text-anchor="middle">{escape(name)}</text>'
        for i, name in enumerate(names)
    ]
    for row in known:
        line = " ".join(f"{x(bucket):.1f},{y(value):.1f}" for bucket, value in row["curve"])
        told = f"{row['name']}: " + ", ".join(f"{value:.1f}" for _, value in row["curve"])
        drawn.append(f'<g><title>{escape(told)}</title><polyline class="curve {_class(row)}" points="{line}"/></g>')
    drawn += _labels(known, y, right + 8, top, bottom)
    drawn.append(f'<text class="soft" x="{right}" y="{bottom + 34}" text-anchor="end">source tokens</text>')
    return _svg(900, bottom + 44, f"{metric} by source length", drawn)


def _table(cells: Sequence[Sequence[str]], verdicts: Sequence[str] | None = None) -> str:
    """A table; with verdicts, its last column says them."""
    head, *rows = cells
    kind = "" if verdicts is None else ' class="judged"'
    found = [f'<div class="wide"><table{kind}><thead><tr>', *(f'<th scope="col">{escape(cell)}</th>' for cell in head)]
    found.append("</tr></thead><tbody>")
    for row, verdict in zip(rows, verdicts or [""] * len(rows), strict=True):
        first, *rest, last = (escape(cell) for cell in row)
        found.append(f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest))
        found.append(f'<td class="{verdict}">{last}</td></tr>')
    return "".join([*found, "</tbody></table></div>"])


def effects(rows: Sequence[dict[str, Any]]) -> str:
    """Every row's effect with its interval, the best first; left of the line is better."""
    known = [row for row in rows if row["effect"] and all(_known(row["effect"][name]) for name in ENDS)]
    known = sorted(known, key=lambda row: row["effect"]["effect"])
    if not known:
        return "<p>No row has an effect yet.</p>"
    left, right, each, top = 190.0, 880.0, 24.0, 16.0
    # One row that failed to learn must not press all others together: the scale is that of the middle of them.
    ends = sorted(max(abs(row["effect"]["low"]), abs(row["effect"]["high"])) for row in known)
    most = _most([min(ends[-1], 4 * ends[len(ends) // 2])])
    height = top + each * len(known) + 40

    def x(value: float) -> float:
        return left + (right - left) * (min(max(value, -most), most) + most) / (2 * most)

    bottom = top + each * len(known)
    drawn = [
        _axis(x, ticks(-most, most), top, bottom),
        f'<line class="zero" x1="{x(0.0):.1f}" x2="{x(0.0):.1f}" y1="{top}" y2="{bottom}"/>',
    ]
    for i, row in enumerate(known):
        effect, y, kind = row["effect"], top + each * (i + 0.5), _class(row)
        told = (
            f"{row['name']}: {effect['effect']:+.4f}, {effect['low']:+.4f} to {effect['high']:+.4f}, {row['verdict']}"
        )
        # Filled where a difference was measured, hollow where not: colour alone tells not everyone.
        dot = "" if kind else ' style="fill: var(--ground)"'
        off = "" if abs(effect["effect"]) <= most else f" ({effect['effect']:+.2f})"
        drawn.append(
            f"<g><title>{escape(told)}</title>"
            f'<text x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(row["name"] + off)}</text>'
            f'<line class="mark {kind}" x1="{x(effect["low"]):.1f}" x2="{x(effect["high"]):.1f}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle class="mark {kind}"{dot} cx="{x(effect["effect"]):.1f}" cy="{y:.1f}" r="4"/></g>'
        )
    drawn.append(f'<text class="soft" x="{left}" y="{bottom + 34}">better</text>')
    drawn.append(f'<text class="soft" x="{right}" y="{bottom + 34}" text-anchor="end">worse</text>')
    return _svg(900, height, "Effect of every row on the final validation loss, with its interval", drawn)


def curves(rows: Sequence[dict[str, Any]]) -> str:
    """The validation loss of every row by step, mean of its seeds; the base is the thick line."""
    drawable = [row | {"curve": [point for point in row["curve"] if _known(point[1])]} for row in rows]
    known = [row for row in drawable if len(row["curve"]) > 1]
    if not known:
        return "<p>No run has a curve yet.</p>"
    left, right, top, bottom = 60.0, 760.0, 16.0, 380.0
    steps = max(row["curve"][-1][0] for row in known) or 1
    low, high = _range(*([row["curve"][i][1] for row in known] for i in (0, -1)))

    def x(step: float | int) -> float:
        return left + (right - left) * step / steps

    def y(loss: float) -> float:
        return bottom - (bottom - top) * (min(max(loss, low), high) - low) / (high - low)

    drawn = [_axis(x, ticks(0.0, float(steps)), top, bottom), _left_axis(y, ticks(low, high), left, right)]
    ordered = sorted(known, key=lambda row: (_class(row) == "base", bool(_class(row))))
    for row in ordered:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in row["curve"])
        told = f"{row['name']}: {row['curve'][-1][1]:.4f} at the end"
        drawn.append(f'<g><title>{escape(told)}</title><polyline class="curve {_class(row)}" points="{points}"/></g>')
    drawn += _labels(known, y, right + 8, top, bottom)
    drawn.append(f'<text class="soft" x="{right}" y="{bottom + 34}" text-anchor="end">steps</text>')
    return _svg(900, bottom + 44, "Validation loss by step, mean of the seeds of each row", drawn)


def _known(value: float | None) -> bool:
    return value is not None and abs(value) <= LARGEST  # NaN is never smaller


def _most(values: Iterable[float]) -> float:
    """The upper end of a scale that begins at 0."""
    most = max(values)
    return most if most > 1 / LARGEST else 1.0


def _range(starts: Sequence[float], finals: Sequence[float]) -> tuple[float, float]:
    """Return the range of losses to draw: from the best end to the median start, or the median end if they rise.

    Where nothing changes, a little around it.
    """
    middle = sorted(starts)[len(starts) // 2]
    low, high = min(*finals, middle), max(middle, sorted(finals)[len(finals) // 2])
    size = max(abs(low), abs(high))
    margin = 0.05 * (high - low) if high - low > 1e-6 * size else 0.05 * size or 1.0
    return low - margin, high + margin


def _labels(rows: Sequence[dict[str, Any]], y: Any, x: float, top: float, bottom: float) -> list[str]:
    """Names at the ends of the curves, moved apart; of many rows only those that stand out."""
    wanted = [row for row in rows if len(rows) <= 24 or _class(row)]
    wanted = sorted(wanted, key=lambda row: row["curve"][-1][1], reverse=True)[: int((bottom - top) // 13)]
    places: list[float] = []
    for row in wanted:
        places.append(max(y(row["curve"][-1][1]), places[-1] + 13 if places else top))
    over = places[-1] - bottom if places else 0.0
    for i in range(len(places) - 1, -1, -1):
        if over > 0:
            places[i] = min(places[i], bottom - 13 * (len(places) - 1 - i))
    return [
        f'<text x="{x}" y="{place + 4:.1f}">{escape(row["name"])}</text>'
        for row, place in zip(wanted, places, strict=True)
    ]


def _axis(x: Any, values: Sequence[float], top: float, bottom: float) -> str:
    return "".join(
        f'<line class="axis" x1="{x(v):.1f}" x2="{x(v):.1f}" y1="{top}" y2="{bottom}"/>'
        f'<text class="soft" x="{x(v):.1f}" y="{bottom + 17}" text-anchor="middle">{_number(v)}</text>'
        for v in values
    )


def _left_axis(y: Any, values: Sequence[float], left: float, right: float) -> str:
    return "".join(
        f'<line class="axis" x1="{left}" x2="{right}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="soft" x="{left - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{_number(v)}</text>'
        for v in values
    )


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from low to high, about so many."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def _svg(width: int, height: float, title: str, drawn: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>' + "".join(drawn) + "</svg>"
    )
