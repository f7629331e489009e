"""The HTML page of an ablation or a ladder (a comparison of architectures): one self-contained file."""

from collections.abc import Callable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from regard.ablation import plots
from regard.ablation.tables import Cells
from regard.files import replace_text
from regard.training.checkpoint import write_json

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6570; --line: #d5dae0; --ground: #ffffff;
  --better: #17723b; --worse: #b3261e; --base: #1c5fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4af; --line: #3a424b; --ground: #14181c;
  --better: #5cc98a; --worse: #ff8a80; --base: #7db4ff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; } code { font-size: .9em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .3rem .45rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.judged th:last-child, .judged td:last-child { text-align: left; }
thead th { border-bottom: 2px solid var(--soft); vertical-align: bottom; }
.better { color: var(--better); } .worse { color: var(--worse); } .base { color: var(--base); }
svg { width: 100%; height: auto; max-width: 62rem; } svg text { font-family: system-ui, sans-serif !important; }
"""
Facts = Sequence[tuple[str, str]]


def save(
    path: Path, record: dict[str, Any], markdown: str, draw: Callable[[], str], warn: Callable[[str], None]
) -> None:
    """Write JSON, Markdown and HTML files with the stem `path`. If drawing the HTML page fails, call `warn`."""
    write_json(path.with_suffix(".json"), record)
    replace_text(path.with_suffix(".md"), markdown)
    path = path.with_suffix(".html")
    try:
        replace_text(path, draw())
    except Exception as error:
        path.unlink(missing_ok=True)  # an older page would not agree with the new tables
        warn(f"warning: {path} could not be drawn ({type(error).__name__}: {error}); the tables beside it are complete")


def html(record: dict[str, Any], cells: Cells, sentences: Sequence[str], facts: Facts = ()) -> str:
    """Return the HTML page of an ablation: `facts`, the table `cells`, the `sentences` that explain it, and plots."""
    rows = record["rows"]
    pictures = [
        ("Effects on the final loss", lambda: plots.effects(rows)),
        ("Validation loss during training", lambda: plots.curves(rows)),
    ]
    table = _table(cells, [plots.kind(row) for row in rows])
    return _page("Ablation", facts, [table, *_paragraphs(sentences), *_drawn(pictures)])


def ladder(
    record: dict[str, Any], metric: str, cells: Cells, by_length: Cells, sentences: Sequence[str], facts: Facts = ()
) -> str:
    """Return the HTML page of a ladder, with plots of `metric` and the table `by_length` (scores by source length)."""
    rows = record["rows"]
    names = [bucket["name"] for bucket in record["buckets"]]
    title = f"{metric} by source length"
    parts = [
        _table(cells, [plots.kind(row) for row in rows]),
        *_paragraphs(sentences),
        *_drawn([(metric, lambda: plots.bars(rows, metric)), (title, lambda: plots.lengths(rows, names, metric))]),
        _table(by_length),
        *_drawn([("Validation loss during training", lambda: plots.curves(rows))]),
    ]
    return _page("The ladder to the Transformer", facts, parts)


def _drawn(pictures: Sequence[tuple[str, Callable[[], str]]]) -> list[str]:
    available = find_spec("matplotlib") is not None
    return [f"<h2>{escape(title)}</h2>\n{draw() if available else plots.MISSING}" for title, draw in pictures]


def _paragraphs(sentences: Sequence[str]) -> list[str]:
    return [f"<p>{escape(sentence)}</p>" for sentence in sentences]


def _page(title: str, facts: Facts, parts: Sequence[str]) -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{title}</title><style>{STYLE}</style></head>\n'
        f"<body>\n<h1>{title}</h1>\n<dl>{listed}</dl>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _table(cells: Cells, verdicts: Sequence[str] | None = None) -> str:
    """Return an HTML table. `verdicts`, if given, contains the CSS class of the last cell of every row."""
    head, *rows = cells
    name = "" if verdicts is None else ' class="judged"'
    parts = [f'<div class="wide"><table{name}><thead><tr>', *(f'<th scope="col">{escape(cell)}</th>' for cell in head)]
    parts.append("</tr></thead><tbody>")
    for row, verdict in zip(rows, verdicts or [""] * len(rows), strict=True):
        first, *rest, last = (escape(cell) for cell in row)
        parts.append(f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{_whole(cell)}</td>" for cell in rest))
        parts.append(f'<td class="{verdict}">{last}</td></tr>')
    return "".join([*parts, "</tbody></table></div>"])


def _whole(cell: str) -> str:
    """Return a cell with non-breaking spaces, so that "mean ± deviation" or an interval is not split over two lines."""
    return cell.replace(" ± ", "\u00a0±\u00a0").replace(", ", ",\u00a0")
