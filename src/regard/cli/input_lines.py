"""Read lines from a file or standard input in batches. A batch ends early if the lines arrive slowly."""

import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO

from regard.errors import DataError

PAUSE = 0.1  # a batch ends after this many seconds without a new line
PATIENCE = 1.0  # a batch ends this many seconds after its first line, even if more lines arrive


def lines_of(file: str | None) -> Iterator[str]:
    """Return an iterator over the lines of a file, or of standard input if `file` is None or `-`."""
    from regard.data.text import decoded_lines, lines

    if file is not None and file != "-":
        return lines(file)
    if sys.stdin is None:  # Python sets it to None if it is closed
        raise DataError("standard input is closed; name a file, or pipe text to the command")
    stream: BinaryIO = sys.stdin.buffer
    with suppress(OSError):  # io.UnsupportedOperation, if sys.stdin is not a file
        # A separate buffer: Python could not exit while a thread waits for input in the buffer of sys.stdin.
        stream = open(stream.fileno(), "rb", closefd=False)  # noqa: SIM115
    return decoded_lines(stream, "standard input")


def pieces_of(file: str | None, size: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (index of the first line, lines) for every batch of at most `size` lines.

    If the input is a terminal or a pipe, a batch also ends when no new line arrives, so that each typed line is
    processed at once. If a line cannot be read, the error is raised after all lines before it have been yielded.
    """
    from regard.data.token_store import chunks

    failed = list[Exception]()
    read = _until_failure(lines_of(file), failed)
    first = 0
    for piece in _as_they_come(read, size) if _pauses(file) else chunks(read, size):
        yield first, piece
        first += len(piece)
    if failed:
        raise failed[0]


def _until_failure(lines: Iterator[str], failed: list[Exception]) -> Iterator[str]:
    """Yield lines. If reading a line fails, append the error to `failed` and stop."""
    try:
        yield from lines
    except Exception as error:  # raised again after the lines before it are processed
        failed.append(error)


def _pauses(file: str | None) -> bool:
    """Return whether lines may arrive slowly, because the input is a terminal, a pipe or a socket."""
    try:
        status = os.fstat(sys.stdin.fileno()) if file in {None, "-"} else os.stat(file or "")
    except (OSError, ValueError):  # missing or unreadable: reading the file raises a precise error
        return False
    return not stat.S_ISREG(status.st_mode)


def _as_they_come(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    """Yield lists of at most `size` lines. A list ends early after `PAUSE` or `PATIENCE` seconds."""
    arrived: queue.Queue[str | None] = queue.Queue(size)

    def read() -> None:
        for line in lines:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, name="lines", daemon=True).start()
    over = False
    while not over:
        piece: list[str] = []
        until = None  # no time limit before the first line
        while len(piece) < size:
            try:
                line = arrived.get(timeout=None if until is None else max(0.0, min(PAUSE, until - time.monotonic())))
            except queue.Empty:
                break
            if line is None:
                over = True
                break
            piece.append(line)
            until = until or time.monotonic() + PATIENCE
        if piece:
            yield piece
