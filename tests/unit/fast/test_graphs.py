"""Capture of CUDA graphs with a mocked device; tests/gpu captures real graphs."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from regard.fast import graphs


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modes that `watched` sets, in order."""
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_an_operation_that_waits_for_the_device_is_reported(modes: list[Any]) -> None:
    def step() -> int:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return 3

    with pytest.warns(UserWarning, match="^something else$") as others:
        result, waits = graphs.watched(step)
    assert (result, waits) == (3, "called a synchronizing CUDA operation")
    assert len(others) == 1
    assert modes == ["warn", 0]


def test_a_step_that_does_not_wait_has_no_warning(modes: list[Any]) -> None:
    assert graphs.watched(lambda: "done") == ("done", None)
    assert modes == ["warn", 0]


def test_the_mode_is_restored_after_an_error(modes: list[Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        graphs.watched(lambda: 1 // 0)
    assert modes == ["warn", 0]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams that are set again after a failed capture."""
    streams: list[Any] = []

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        assert not gc.isenabled()
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", partial(Mock, spec=torch.cuda.CUDAGraph))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "current")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(graphs, "_broken", [])
    return streams


STREAM: Any = Mock(spec=torch.cuda.Stream, device="cuda")


def test_garbage_collection_is_off_during_a_capture(streams: list[Any]) -> None:
    graphs.capture(lambda: None, STREAM)
    assert gc.isenabled()
    assert (streams, graphs._broken) == ([], [])


def test_a_failed_capture_restores_the_stream_and_keeps_its_graph(streams: list[Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        graphs.capture(lambda: 1 // 0, STREAM)
    assert streams == ["current"]
    assert len(graphs._broken) == 1
    assert gc.isenabled()
