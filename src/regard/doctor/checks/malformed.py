"""The format of the files: lines with a wrong number of columns, lines that are not JSON, missing fields."""

from collections.abc import Iterator

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, SHOWN, Finding, numbered


def malformed(case: Case) -> Iterator[Finding]:
    """Find lines that do not have the format of their file. `regard train` rejects files with such lines."""
    for text in case.texts:
        for part in text.parts:
            if not part.malformed:
                continue
            lines = tuple(line for line, _ in part.malformed)
            yield Finding(
                "format",
                "error",
                f"{part.files[0]}: {len(lines):,} of {part.counts[0]:,} lines do not have the format of the file",
                (numbered(lines), *(f"line {line:,} {why}" for line, why in part.malformed[:SHOWN])),
                "correct or remove these lines; a tab inside a text is written as a space",
                lines[:MOST_LINES],
            )
