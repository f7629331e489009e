"""Tables of text cells, for a terminal and as Markdown."""

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

Cells = Sequence[Sequence[str]]  # rows of cells, the headings first


def terminal(
    cells: Cells, left: Collection[int], wrap: Collection[int] = (), narrow: bool = False, styles: Sequence[str] = ()
) -> Table:
    """Return a table for a terminal. Columns in `left` are left-aligned, and columns in `wrap` may be wrapped.

    `styles` contains the style of the last cell of each row below the headings.
    """
    head, *rows = cells
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
    for i, heading in enumerate(head):
        table.add_column(heading, justify="left" if i in left else "right", no_wrap=i not in wrap)
    for row, style in zip_longest(rows, styles, fillvalue=""):
        table.add_row(*(Text(cell) for cell in row[:-1]), Text(row[-1], str(style)))
    return table


def markdown(cells: Cells, left: Collection[int]) -> list[str]:
    """Return the lines of a Markdown table. Columns in `left` are left-aligned."""
    head, *rows = cells
    alignment = ["---" if i in left else "--:" for i in range(len(head))]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, alignment, *rows)]


def number(value: Any, style: str) -> str:
    """Return a number in the format `style`, or an empty string for None."""
    return "" if value is None else format(value, style)


def quantity(value: float | int | None) -> str:
    """Return a number with three digits and a letter, such as `12.3M`, or an empty string for None."""
    if value is None:
        return ""
    power = 0
    while power < 5 and value >= 1000 ** (power + 1):
        power += 1
    return f"{value / 1000**power:.3g}{['', 'K', 'M', 'G', 'T', 'P'][power]}"
