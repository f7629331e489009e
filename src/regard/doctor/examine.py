"""Examine training text before training, and training runs during and after it."""

import time
from collections.abc import Callable
from typing import Any, Unpack

from regard.doctor.case import Case
from regard.doctor.checks import language
from regard.doctor.finding import Finding, Report, Skipped
from regard.doctor.tables import TEXT_CHECKS
from regard.recipe.recipe import RecipeRequest
from regard.runs.options import RequestOptions, accepts
from regard.runs.request import request_from_options

Progress = Callable[[str], None]


@accepts(RequestOptions, request_from_options)
def examine_text(*, report: Progress = lambda _: None, **options: Unpack[RequestOptions]) -> Report:
    """Examine training text, and return what is found. The options are those of `regard train`."""
    return text_report(request_from_options(**options), report)


def text_report(request: RecipeRequest, progress: Progress = lambda _: None) -> Report:
    """Examine the text of a request for training, and return what is found."""
    began = time.perf_counter()
    progress("reading the text")
    case = Case.of(request)
    report = Report(subject(case))
    report.facts["examples"] = case.train.size
    report.facts["seconds_by_check"] = seconds = dict[str, float]()
    for text in case.texts:
        if text.examined:
            report.findings.append(Finding("amount", "note", text.examined))
    for check in TEXT_CHECKS:
        if not check.applies(case.objective):
            continue
        if check.name == "language" and not language.installed():
            report.skipped.append(Skipped(check.name, "needs py3langid: pip install 'regard[doctor]'"))
            continue
        progress(f"checking: {check.name}")
        started = time.perf_counter()
        report.add(check.name, check.find(case))
        seconds[check.name] = round(time.perf_counter() - started, 3)
    report.seconds = time.perf_counter() - began
    return report


def subject(case: Case) -> str:
    """Return a line that names the examined text."""
    files = ", ".join(dict.fromkeys(file for part in case.train.parts for file in part.files))
    validation = "" if case.valid is None else f"; validation: {case.valid.size:,}"
    return f"{case.train.size:,} examples for {case.objective.kind} in {files}{validation}"


def record(report: Report) -> dict[str, Any]:
    """Return a report as a JSON object."""
    return report.record()
