"""Empty lines, which training leaves out."""

from collections.abc import Iterator

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, Finding, counted, numbered, share

MANY = 0.01  # share of the examples above which empty ones are a warning


def empty(case: Case) -> Iterator[Finding]:
    """Find examples in which a text is empty or white space."""
    for text in case.texts:
        for name in case.names:
            column = text.columns[name]
            found = [i for i, each in enumerate(column) if not each or each.isspace()]
            if not found:
                continue
            lines = tuple(map(text.line, found[:MOST_LINES]))
            level = "warning" if len(found) > MANY * text.size and len(found) > 2 else "note"
            yield Finding(
                "empty lines",
                level,
                f"{text.name}: {counted(len(found), name)} empty ({share(len(found), text.size)})",
                (numbered(lines),),
                "training leaves these examples out; if only one side is empty, its text was lost: restore it",
                lines,
            )
