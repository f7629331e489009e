"""Read lines from a file or standard input, in batches that do not wait for a slow writer."""

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

PAUSE = 0.1  # seconds without a new line after which a partial batch is processed
PATIENCE = 1.0  # seconds after which it is processed even if more lines keep coming


def lines_of(file: str | None) -> Iterator[str]:
    """The lines of a file, or of standard input."""
    from regard.data.text import decoded_lines, lines

    if file is not None and file != "-":
        return lines(file)
    if sys.stdin is None:  # Python's way to say that it is closed
        raise DataError("standard input is closed; name a file, or give it text")
    stream: BinaryIO = sys.stdin.buffer
    with suppress(OSError):  # io.UnsupportedOperation, where it is no file
        # A buffer of our own: a thread may be waiting in it when we leave, and in its own Python would not allow that.
        stream = open(stream.fileno(), "rb", closefd=False)  # noqa: SIM115
    return decoded_lines(stream, "standard input")


def pieces_of(file: str | None, size: int) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line, lines): `size` of them, or fewer where their writer pauses.

    A file on disk never pauses. From a terminal or a pipe, a batch ends at a pause, so that each typed line is answered
    at once. An error in a line is raised after the lines before it.
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
    """The lines before the first that cannot be read; why it cannot is appended to `failed`."""
    try:
        yield from lines
    except Exception as error:  # raised again once the lines before it are worked on
        failed.append(error)


def _pauses(file: str | None) -> bool:
    """Return True for a stream that can pause: a terminal, a pipe, a socket."""
    try:
        status = os.fstat(sys.stdin.fileno()) if file in {None, "-"} else os.stat(file or "")
    except (OSError, ValueError):  # no file at all, or none that can be opened: reading says which
        return False
    return not stat.S_ISREG(status.st_mode)


def _as_they_come(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    """Lists of at most `size` lines: those that came before a pause."""
    arrived: queue.Queue[str | None] = queue.Queue(size)

    def read() -> None:
        for line in lines:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, name="lines", daemon=True).start()
    over = False
    while not over:
        piece: list[str] = []
        until = None  # nobody waits for an answer before the first line
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
