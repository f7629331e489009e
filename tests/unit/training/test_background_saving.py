"""Saving in the background: one write at a time, errors reach training, and copies do not change."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from regard.training import background_saving
from regard.training.background_saving import BackgroundSaver, HostCopy


def in_turn(*actions: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls all actions."""

    def write() -> None:
        for action in actions:
            action()

    return write


def failing(error: BaseException) -> Callable[[], None]:
    def write() -> None:
        raise error

    return write


def test_writing_does_not_block_the_caller() -> None:
    release, done = threading.Event(), threading.Event()
    saver = BackgroundSaver()
    saver.start(in_turn(release.wait, done.set))
    saver.check()
    assert not done.is_set()
    release.set()
    saver.wait()
    assert done.is_set()
    assert saver.seconds > 0


def test_the_next_write_waits_for_the_previous_one() -> None:
    order: list[str] = []
    saver = BackgroundSaver()
    saver.start(in_turn(lambda: time.sleep(0.1), lambda: order.append("first")))
    saver.start(lambda: order.append("second"))
    saver.wait()
    assert order == ["first", "second"]


@pytest.mark.parametrize("call", ["check", "wait", "start", "exit"])
def test_an_error_of_the_thread_is_raised_once(call: str) -> None:
    saver, written = BackgroundSaver(), []
    saver.start(failing(OSError("full")))
    assert saver._thread is not None
    saver._thread.join()
    calls: dict[str, Callable[[], object]] = {
        "check": saver.check,
        "wait": saver.wait,
        "start": lambda: saver.start(lambda: written.append(1)),
        "exit": lambda: saver.__exit__(None, None, None),
    }
    with pytest.raises(OSError, match="full"):
        calls[call]()
    assert written == []
    saver.wait()
    saver.check()


def test_an_error_of_the_block_is_raised_rather_than_that_of_the_thread() -> None:
    done: list[int] = []
    saver = BackgroundSaver()
    saver.start(in_turn(lambda: time.sleep(0.1), lambda: done.append(1), lambda: 1 / 0))
    with pytest.raises(ValueError, match="diverged"), saver:
        raise ValueError("diverged")
    assert done == [1]  # the thread had ended before the error left the block


def test_an_interruption_does_not_wait_for_a_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_saving, "PATIENCE", 0.05)
    release, saver = threading.Event(), BackgroundSaver()
    began = time.monotonic()
    saver.start(in_turn(lambda: release.wait(30)))
    with pytest.raises(KeyboardInterrupt), saver:
        raise KeyboardInterrupt
    assert time.monotonic() - began < 5
    release.set()


def test_copies_keep_their_values_when_training_goes_on() -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "t": torch.arange(6.0).reshape(2, 3).T, "n": torch.tensor(3)}
    copy = HostCopy(tensors)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.add_(1)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in copy.tensors().items())
    assert all(tensor.is_contiguous() for tensor in copy.tensors().values())
