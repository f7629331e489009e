"""The encoding of the files: bytes that are not valid UTF-8, byte-order marks, files that end early."""

from collections.abc import Iterator

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, SHOWN, Finding, numbered, quoted
from regard.doctor.reading import TextFile


def encoding(case: Case) -> Iterator[Finding]:
    """Find lines that are not valid UTF-8, files that cannot be read to the end, and byte-order marks."""
    for text in case.texts:
        for file in text.files:
            yield from _of_file(file)


def _of_file(file: TextFile) -> Iterator[Finding]:
    if file.broken:
        yield Finding(
            "encoding", "error", file.broken, advice="make a new copy of the file in UTF-8, whole and unpacked"
        )
    if file.invalid:
        lines = tuple(line for line, _, _ in file.invalid)
        yield Finding(
            "encoding",
            "error",
            f"{file.path}: {file.invalid_count:,} of {file.count:,} lines are not UTF-8",
            (
                numbered(lines),
                *(f"line {n:,}, read as Windows-1252: {quoted(text)}" for n, _, text in file.invalid[:SHOWN]),
            ),
            _advice(file),
            lines[:MOST_LINES],
        )
    if file.byte_order_mark:
        yield Finding(
            "encoding",
            "note",
            f"{file.path} begins with a byte-order mark",
            advice="none needed: training leaves it out",
        )


def _advice(file: TextFile) -> str:
    if file.invalid_count > file.count / 100:
        return f"convert the file: iconv -f WINDOWS-1252 -t UTF-8 {file.path} > converted"
    return "correct or remove these lines; in parallel files, remove the same line of the other file"
