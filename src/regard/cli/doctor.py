"""The command `doctor`: examine training text before training, and training runs during and after it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.base import TRAIN, AsJson, Device, Threads, TrustCode, console, print_json, print_option, set_threads
from regard.cli.options import TextFiles, command
from regard.errors import SpecError

if TYPE_CHECKING:
    from regard.doctor.finding import Finding, Report

WIDTH = 80  # columns of the output
MARGIN = 9  # columns of the level


@command(TRAIN)
def doctor(
    files: TextFiles,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Folder of a training run to examine.")] = None,
    task: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel="Training data", help="Task, as in `regard train`.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recipe of the planned training: a .toml or .json file.")
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="Model of the planned training.")] = None,
    variants: Annotated[
        list[str] | None, typer.Option("--variant", metavar="NAME", help="Modification of the model. Repeatable.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change the recipe, as in `regard train`. Repeatable."),
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Number of steps of the planned training.")] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="Time of the planned training, such as 5m or 2h.")
    ] = None,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Examine only the text; do not run a training step on the worst batch.")
    ] = False,
    examples: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Validation examples that the model of RUN decodes. Default: 100."),
    ] = None,
    page: Annotated[
        Path | None, print_option(metavar="FILE", help="Also write the result to this HTML page, such as doctor.html.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Examine training text before training, or a training run.

    With training files, the doctor looks for faults in the text, and runs one training step on the worst batch to show
    that training fits the device. With RUN, it names what is wrong with a training run, during or after training, and
    what to try.

    The exit code is 1 if there are errors, and 0 if there are only warnings and notes.
    """
    given = files.keywords()
    planned = {"task": task, "recipe": recipe, "preset": preset, "variants": variants, "changes": changes}
    planned = {name: value for name, value in (planned | {"steps": steps, "time": time}).items() if value}
    _check(run, {**given, **planned}, no_probe, examples)
    if run is not None:
        set_threads(threads, device=device)
        report, extras = _of_run(run, device, examples, trust_code)
    else:
        set_threads(threads, "train", device)
        report, extras = _of_text({**given, **planned, "trust_code": trust_code}, not no_probe, device)
    if page is not None:
        from regard.doctor.page import write_page

        write_page(page, report, extras)
    if as_json:
        print_json(report.record())
    else:
        print_report(report, page)
    raise typer.Exit(1 if report.of_level("error") else 0)


def _check(run: str | None, options: dict[str, Any], no_probe: bool, examples: int | None) -> None:
    """Raise an error for options that would have no effect."""
    if run is None and not options:
        raise SpecError("", "nothing to examine; name a training run, or give --source and --target, --tsv or --text")
    if run is not None and options:
        name = next(iter(options)).replace("_", "-").replace("changes", "set").replace("variants", "variant")
        raise SpecError(
            f"--{name}", f"has no effect on {run}, whose text and recipe are known; leave one of the two out"
        )
    if run is not None and no_probe:
        raise SpecError("--no-probe", "has no effect on a training run; leave it out")
    if run is None and examples is not None:
        raise SpecError("--examples", "applies only to a training run; leave it out")


def _of_text(options: dict[str, Any], probe: bool, device: str) -> tuple["Report", Any]:
    from regard.doctor.case import Case
    from regard.doctor.examine import add_probe, text_report
    from regard.runs.request import request_from_options

    with _status() as progress:
        case = Case.of(request_from_options(**options))
        report = text_report(case, progress)
        if probe:
            add_probe(report, case.request, device, progress)
    return report, case


def _of_run(run: str, device: str, examples: int | None, trust_code: bool) -> tuple["Report", Any]:
    from regard.doctor.examine import run_report
    from regard.doctor.run_record import EXAMPLES, RunRecord

    record = RunRecord.read(run, device, EXAMPLES if examples is None else examples, trust_code)
    with _status() as report:
        return run_report(record, report), record


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step of the examination, if the output is a terminal."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda _: None
        return
    with screen.status("") as status:
        yield status.update


def print_report(report: "Report", page: Path | None = None) -> None:
    """Print a report: findings with evidence and advice, worst first, and the checks that found nothing."""
    _print(report.subject, "", 0)
    print()
    for finding in report.worst_first:
        _print_finding(finding)
    if report.passed:
        _print(", ".join(report.passed), "nothing found by: ", 2)
    for skipped in report.skipped:
        _print(f"{skipped.check}: {skipped.why}", "skipped: ", 2)
    if page is not None:
        print(f"page: {page}")
    print(summary(report))


def summary(report: "Report") -> str:
    """Return the last line of the output, such as "2 errors, 1 warning, 3 notes (4.1 s)"."""
    counts = ((len(report.of_level(level)), level) for level in ("error", "warning", "note"))
    parts = ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for count, level in counts if count)
    verdict = "healthy: no errors or warnings" if report.healthy else parts
    if report.healthy and parts:
        verdict += f", {parts}"
    return f"{verdict} ({report.seconds:.1f} s)"


def _print_finding(finding: "Finding") -> None:
    """Print a finding with its evidence and advice; of a note, only the first piece of evidence."""
    _print(f"{finding.check}: {finding.message}", f"{finding.level:<{MARGIN}}", MARGIN)
    for line in finding.evidence[: 1 if finding.level == "note" else None]:
        _print(line, " " * (MARGIN + 2), MARGIN + 4)
    if finding.advice and finding.level != "note":
        _print(finding.advice, f"{'':{MARGIN}}try: ", MARGIN)


def _print(text: str, first: str, indent: int) -> None:
    """Print a text wrapped to 80 columns; the first line begins with `first`, the others with `indent` spaces."""
    lines = wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    print("\n".join(lines or [first]).replace("\u00a0%", " %"))
