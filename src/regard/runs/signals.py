"""Signals that end training: a checkpoint is saved, and the process exits with the code that shells expect."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# SIGUSR1 is what Slurm sends before the time limit of a job, with `sbatch --signal=USR1@120`. Windows lacks it and
# SIGHUP, which is sent when a terminal closes.
REASONS = {
    getattr(signal, name): reason
    for name, reason in {
        "SIGINT": "interrupted",
        "SIGTERM": "terminated",
        "SIGHUP": "the terminal was closed",
        "SIGUSR1": "the time limit of the cluster is near (SIGUSR1)",
    }.items()
    if hasattr(signal, name)
}


class StopSignals:
    """The first signal that has arrived and ends training."""

    def __init__(self) -> None:
        self.number: int | None = None

    @property
    def reason(self) -> str | None:
        """The reason to stop training, or None if no signal has arrived."""
        return None if self.number is None else REASONS[self.number]

    @property
    def exit_code(self) -> int | None:
        """The exit code after the signal, 128 + its number as in shells (130 after Ctrl-C), or None."""
        return None if self.number is None else 128 + self.number


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Record the first signal that ends training during a `with` block.

    A second Ctrl-C has its usual effect, and exits at once. Other repeated signals change nothing, because clusters
    send a signal to all processes of a job, and launchers send it again. A signal that is ignored (such as SIGHUP after
    `nohup`) remains ignored. Outside the main thread, Python cannot handle signals, and none is recorded.
    """
    caught = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in REASONS}

    def note(number: int, _: Any) -> None:
        caught.number = caught.number or number
        if number == signal.SIGINT:
            signal.signal(number, before[number])

    handled = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    try:
        for number in handled:
            signal.signal(number, note)
        yield caught
    finally:
        for number in handled:
            signal.signal(number, before[number])
