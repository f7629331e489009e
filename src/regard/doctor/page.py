"""The HTML page of a report: one self-contained file with findings, curves and example outputs."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from regard.ablation.page import STYLE
from regard.doctor.case import Case
from regard.doctor.curves import of_run, of_text
from regard.doctor.finding import Finding, Report
from regard.doctor.run_record import RunRecord
from regard.errors import DataError
from regard.files import replace_text

SHOWN = 20  # number of example outputs
MORE_STYLE = """
article { border-left: 4px solid var(--line); padding: .1rem 0 .1rem 1rem; margin: 1rem 0; }
article.error { border-color: var(--worse); } article.warning { border-color: var(--base); }
article p { margin: .3rem 0; } article ul { margin: .3rem 0; color: var(--soft); }
.level { text-transform: uppercase; font-size: .75rem; letter-spacing: .05em; color: var(--soft); }
.outputs { table-layout: fixed; } .outputs th, .outputs td { text-align: left; vertical-align: top; }
"""


def write_page(path: Path, report: Report, examined: Case | RunRecord) -> None:
    """Write the page of a report on a text or on a run."""
    try:
        replace_text(path, html(report, examined))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); choose another file for --page"
        ) from None


def html(report: Report, examined: Case | RunRecord) -> str:
    """Return the page of a report on a text or on a run."""
    parts = [_article(finding) for finding in report.worst_first] or ["<p>There are no findings.</p>"]
    if report.passed:
        parts.append(f"<p>Nothing was found by: {escape(', '.join(report.passed))}.</p>")
    parts += [f"<p>Skipped: {escape(each.check)}: {escape(each.why)}</p>" for each in report.skipped]
    pictures = of_run(examined) if isinstance(examined, RunRecord) else of_text(examined.train, examined.names)
    parts += [f"<h2>{escape(title)}</h2>\n{drawing}" for title, drawing in pictures]
    parts += _outputs(examined) if isinstance(examined, RunRecord) else _plan(report)
    return _page(report, parts)


def _article(finding: Finding) -> str:
    evidence = "".join(f"<li>{escape(line)}</li>" for line in finding.evidence)
    advice = f"<p>Try: {escape(finding.advice)}</p>" if finding.advice else ""
    return (
        f'<article class="{finding.level}"><p class="level">{finding.level}: {escape(finding.check)}</p>'
        f"<p>{escape(finding.message)}</p>{f'<ul>{evidence}</ul>' if evidence else ''}{advice}</article>"
    )


def _outputs(run: RunRecord) -> list[str]:
    found = run.outputs
    if found is None:
        return []
    rows = list(zip(found.sources, found.outputs, found.references, strict=True))[:SHOWN]
    head = "".join(f"<th>{name}</th>" for name in ("source", "output", "reference"))
    cells = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return [
        f'<h2>Example outputs</h2><table class="outputs"><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>'
    ]


def _plan(report: Report) -> list[str]:
    reasons: Sequence[str] = report.facts.get("probe", {}).get("plan", ())
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return [f"<h2>The planned training</h2><ul>{listed}</ul>"] if listed else []


def _page(report: Report, parts: Sequence[str]) -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    counts = ", ".join(f"{len(report.of_level(level))} {level}s" for level in ("error", "warning", "note"))
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>Doctor</title><style>{STYLE}{MORE_STYLE}</style></head>\n'
        f"<body>\n<h1>Doctor</h1>\n<p>{escape(report.subject)}</p>\n<p>{counts}</p>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
