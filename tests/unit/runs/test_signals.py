"""Signals that end training are recorded, and only a second Ctrl-C exits at once."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from regard.runs.signals import REASONS, stop_signals


@pytest.fixture(autouse=True)
def inherited() -> Iterator[None]:
    """Restore all handlers. SIGINT gets Python's handler, because a job in the background ignores it."""
    before = {number: signal.getsignal(number) for number in REASONS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", REASONS)
def test_the_first_signal_is_recorded(number: int) -> None:
    before = signal.getsignal(number)
    with stop_signals() as caught:
        assert (caught.reason, caught.exit_code) == (None, None)
        os.kill(os.getpid(), number)
        assert caught.reason == REASONS[number]
        assert caught.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_interrupts() -> None:
    with stop_signals() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        assert caught.reason == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_repeated_signals_change_nothing() -> None:
    """Slurm sends SIGUSR1, then SIGTERM to all processes of a job, and torchrun sends SIGTERM to its workers again."""
    with stop_signals() as caught:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert caught.exit_code == 128 + signal.SIGUSR1


def test_an_ignored_signal_remains_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with stop_signals() as caught:
        os.kill(os.getpid(), signal.SIGHUP)
        assert caught.reason is None


def test_outside_the_main_thread_no_signal_is_recorded() -> None:
    results: list[bool] = []

    def work() -> None:
        with stop_signals() as caught:
            results.append(caught.reason is None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [True]
