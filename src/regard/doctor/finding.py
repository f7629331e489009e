"""The result of an examination: findings with a level, evidence and advice, and the report that lists them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
SHOWN = 3  # number of examples that are given as evidence
WIDTH = 60  # characters of a text that is quoted


@dataclass(frozen=True)
class Finding:
    """One thing that an examination has found.

    An error makes training fail or its result useless. A warning costs quality or time. A note is a fact that is usual
    in good data.
    """

    check: str  # the name of the check, as in the table of checks
    level: Level
    message: str
    evidence: tuple[str, ...] = ()  # places and examples
    advice: str = ""
    lines: tuple[int, ...] = ()  # line numbers, at most `MOST_LINES`


@dataclass(frozen=True)
class Skipped:
    """A check that was not run, and the reason."""

    check: str
    why: str


@dataclass
class Report:
    """All findings of an examination, the checks that found nothing, and those that were skipped."""

    subject: str
    findings: list[Finding] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)  # names of checks without findings
    skipped: list[Skipped] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # numbers that were measured
    seconds: float = 0.0

    def add(self, check: str, findings: Iterable[Finding]) -> None:
        """Append the findings of a check. A check without findings has passed."""
        found = list(findings)
        self.findings += found
        if not found:
            self.passed.append(check)

    def of_level(self, level: Level) -> list[Finding]:
        """Return the findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    @property
    def worst_first(self) -> list[Finding]:
        """All findings, errors first. Findings of one level keep the order of the checks."""
        return sorted(self.findings, key=lambda finding: LEVELS.index(finding.level))

    @property
    def healthy(self) -> bool:
        """True if there are neither errors nor warnings."""
        return not self.of_level("error") and not self.of_level("warning")

    def record(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        counts = {f"{level}s": len(self.of_level(level)) for level in LEVELS}
        return {
            "subject": self.subject,
            "healthy": self.healthy,
            **counts,
            "findings": [asdict(finding) for finding in self.worst_first],
            "passed": self.passed,
            "skipped": [asdict(each) for each in self.skipped],
            "facts": self.facts,
            "seconds": round(self.seconds, 2),
        }


MOST_LINES = 1000


def quoted(text: str, width: int = WIDTH) -> str:
    """Return a text in quotation marks, shortened to `width` characters, with escapes for invisible characters."""
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: width + 1])
    return f'"{line[: width - 3]}..."' if len(text) > width else f'"{line}"'


def share(part: float | int, whole: float | int) -> str:
    """Return a share in percent, with more digits for a small one, such as "3.1 %" or "0.004 %"."""
    percent = 100 * part / max(1, whole)
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.2g} %"


def numbered(lines: Sequence[int], most: int = 8) -> str:
    """Return line numbers as text, such as "line 4" or "lines 3, 5, 8 and 120 more"."""
    if len(lines) == 1:
        return f"line {lines[0]:,}"
    listed = ", ".join(f"{line:,}" for line in lines[:most])
    return f"lines {listed}" + (f" and {len(lines) - most:,} more" if len(lines) > most else "")


def counted(count: int, column: str, verb: str = "is are") -> str:
    """Return a number of texts of a column with a verb, such as "1 source text is" or "3 texts are"."""
    one, more = verb.split()
    name = "" if column == "text" else f"{column} "
    return f"{count:,} {name}{f'text {one}' if count == 1 else f'texts {more}'}"
