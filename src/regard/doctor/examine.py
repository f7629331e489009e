"""Examine training text before training, and training runs during and after it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from regard.doctor.case import Case
from regard.doctor.checks import language
from regard.doctor.finding import Finding, Report, Skipped
from regard.doctor.forecast import forecast
from regard.doctor.probe import probe as run_probe
from regard.doctor.resources import free_space
from regard.doctor.run_record import EXAMPLES, RunRecord
from regard.doctor.tables import CAUSES, SYMPTOMS, TEXT_CHECKS
from regard.errors import DataError
from regard.recipe.recipe import RecipeRequest
from regard.runs.options import RequestOptions, accepts
from regard.runs.request import request_from_options

Progress = Callable[[str], None]
REFUSED = {"encoding", "format", "alignment", "labels"}  # with errors of these checks, a plan has no use


@accepts(RequestOptions, request_from_options)
def examine_text(
    *,
    probe: bool = True,
    device: str = "auto",
    report: Progress = lambda _: None,
    **options: Unpack[RequestOptions],
) -> Report:
    """Examine training text, and return what is found. The options are those of `regard train`.

    If `probe` is true, also plan a model as in training, and run one training step on the worst batch on `device`.
    """
    case = Case.of(request_from_options(**options))
    examined = text_report(case, report)
    if probe:
        add_probe(examined, case.request, device, report)
    return examined


def text_report(case: Case, progress: Progress = lambda _: None) -> Report:
    """Examine the text of a case, and return what is found."""
    began = time.perf_counter()
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
        if any(finding.check == check.unless and finding.level != "note" for finding in report.findings):
            report.skipped.append(Skipped(check.name, f"the findings of {check.unless} come first"))
            continue
        progress(f"checking: {check.name}")
        started = time.perf_counter()
        report.add(check.name, check.find(case))
        seconds[check.name] = round(time.perf_counter() - started, 3)
    report.seconds = time.perf_counter() - began
    return report


def add_probe(report: Report, request: RecipeRequest, device: str, progress: Progress = lambda _: None) -> None:
    """Run the worst batch of the planned training, and add what training needs to the report."""
    refused = {finding.check for finding in report.of_level("error")} & REFUSED
    if refused:
        report.skipped.append(Skipped("memory", f"first correct the errors of {' and '.join(sorted(refused))}"))
        return
    began = time.perf_counter()
    try:
        measured = run_probe(request, device, progress)
    except DataError as error:
        report.skipped.append(Skipped("memory", str(error)))
        return
    report.add("memory", forecast(measured, free_space()))
    report.facts["probe"] = measured.record()
    report.seconds += time.perf_counter() - began


def subject(case: Case) -> str:
    """Return a line that names the examined text."""
    files = ", ".join(dict.fromkeys(file for part in case.train.parts for file in part.files))
    validation = "" if case.valid is None else f"; validation: {case.valid.size:,}"
    what = "lines" if case.objective.stream else "examples"
    return f"{case.train.size:,} {what} for {case.objective.kind} in {files}{validation}"


def examine_run(
    run: str | Path,
    *,
    device: str = "auto",
    examples: int = EXAMPLES,
    trust_code: bool = False,
    report: Progress = lambda _: None,
) -> Report:
    """Examine a training run during or after training, and return what is found.

    `examples` is the number of validation examples that the model decodes; with 0, the model is not loaded.
    """
    return run_report(RunRecord.read(run, device, examples, trust_code), report)


def run_report(run: RunRecord, progress: Progress = lambda _: None) -> Report:
    """Examine a training run, then its training text, and return what is found."""
    began = time.perf_counter()
    report = Report(f"{run.folder.path}, {run.recipe.data.objective.kind}, step {run.step:,} of {run.steps:,}")
    report.facts |= {"step": run.step, "steps": run.steps, "scores": dict(run.scores)}
    for symptom in SYMPTOMS:
        progress(f"checking: {symptom.name}")
        report.add(symptom.name, symptom.find(run))
    if run.objective_model != "language_model" and run.outputs is None:
        why = "--examples 0 was given" if not run.examples else "there is no checkpoint, or no validation text"
        report.skipped.append(Skipped("outputs", why))
        report.passed = [name for name in report.passed if name not in ("outputs", "copies", "use of the source")]
    progress("checking the training text")
    _add_causes(run, report)
    if report.of_level("error"):  # the advice to go on would mislead
        report.findings = [each for each in report.findings if (each.check, each.level) != ("fitting", "note")]
    report.seconds = time.perf_counter() - began
    return report


def _add_causes(run: RunRecord, report: Report) -> None:
    """Add warnings and errors in the training text that explain symptoms of the run."""
    try:
        case = Case.of(RecipeRequest(run.recipe.data))
    except (DataError, OSError) as error:
        report.skipped.append(Skipped("training text", str(error)))
        return
    causes = list[Finding]()
    for check in TEXT_CHECKS:
        if check.name in CAUSES and check.applies(case.objective):
            found = [finding for finding in check.find(case) if finding.level != "note"]
            causes += found
            if not found:
                report.passed.append(f"{check.name} of the training text")
    report.findings = causes + report.findings  # a cause comes before its symptoms
