"""The tables of a length benchmark, as rows of text: time, memory, FLOPs, and accuracy by distance."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Table = tuple[str, list[tuple[str, ...]]]  # the title, and the cells with the headings first


def tables(record: Mapping[str, Any]) -> list[Table]:
    """Return the tables for a `LengthReport`, which is given as a JSON object."""
    found = [
        _by_length(record, "Seconds per training step", "seconds", lambda value: f"{value:.3g}"),
        _by_length(record, "Peak memory, MB", "peak_bytes", lambda value: f"{value / 1e6:,.0f}"),
        _by_length(record, "GFLOPs per training step", "flops", lambda value: f"{value / 1e9:,.3g}"),
    ]
    found = found if record["rows"] else []
    if record["recall"]:
        found.append(_recall(record["recall"]))
    return found


def _by_length(record: Mapping[str, Any], title: str, field: str, text: Callable[[float], str]) -> Table:
    lengths = list(dict.fromkeys(row["length"] for row in record["rows"]))
    fitted = any(field in exponents for exponents in record["exponents"].values())
    cells = [("tokens", *(f"{length:,}" for length in lengths), *(("exponent",) if fitted else ()))]
    for name, exponents in record["exponents"].items():
        rows = [row for row in record["rows"] if row["name"] == name]
        values = [_failure(row) if row[field] is None else text(row[field]) for row in rows]
        slope = exponents.get(field)
        cells.append((rows[0]["title"], *values, *(("-" if slope is None else f"{slope:.2f}",) if fitted else ())))
    return title, cells


def _failure(row: Mapping[str, Any]) -> str:
    """Return the first words of the reason why a number is missing."""
    failed = row["failed"] or "-"
    return next((word for word in ("memory", "time", "error") if word in failed.split(":")[0]), "-")


def _recall(recall: Mapping[str, Any]) -> Table:
    distances = list(dict.fromkeys(distance for row in recall["rows"] for distance in row["accuracy"]))
    cells = [("distance", *(f"{int(distance):,}" for distance in distances), "parameters")]
    for row in recall["rows"]:
        values = [f"{row['accuracy'][distance]:.2f}" if row["accuracy"] else _failure(row) for distance in distances]
        cells.append((row["title"], *values, f"{row['parameters']:,}"))
    return f"Accuracy of associative recall in {recall['length']} tokens; guessing: {recall['chance']:.2f}", cells


def markdown(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, with right-aligned numbers."""
    head, *rows = cells
    return [
        f"| {' | '.join(head)} |",
        f"|---|{'--:|' * (len(head) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
