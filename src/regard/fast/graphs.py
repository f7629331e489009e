"""CUDA graphs: test whether a step can be captured, and capture it.

A capture fails if an operation waits for the device, and then leaves the allocator and the random number generators in
an invalid state. So a step first runs in a mode that reports operations that wait, and is only captured if it has none.
"""

import gc
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_broken: list[torch.cuda.CUDAGraph] = []  # the graph of a failed capture must not be freed


def watched(step: Callable[[], Result]) -> tuple[Result, str | None]:
    """Return the result of a step, and torch's warning about an operation that waited for the device, or None."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            result = step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    waits = next((str(each.message) for each in messages if "synchroniz" in str(each.message)), None)
    for each in messages:
        if "synchroniz" not in str(each.message):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return result, waits


def capture(step: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Return a graph captured from a step. The step's operations run only when the graph is replayed."""
    graph, here, collecting = torch.cuda.CUDAGraph(), torch.cuda.current_stream(stream.device), gc.isenabled()
    gc.collect()
    gc.disable()  # an object freed during a capture may itself be a graph
    try:
        # thread_local, because another thread may prepare batches in pinned memory during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            step()
    except Exception:
        _broken.append(graph)
        torch.cuda.set_stream(here)
        raise
    finally:
        if collecting:
            gc.enable()
    return graph
