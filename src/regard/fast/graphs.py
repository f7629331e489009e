"""CUDA graphs: find out whether a step can be captured before it is tried, and capture it.

A capture that is broken off half-way, by an operation that waits for the device, leaves allocator and generators in
disorder. So a step is first watched while it runs, and what waits is never captured.
"""

import gc
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_broken: list[torch.cuda.CUDAGraph] = []  # what a broken capture leaves behind must not be freed


def watched(step: Callable[[], Result]) -> tuple[Result, str | None]:
    """Run a step; its result, and what in it made the host wait for the device (None: nothing did)."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    waits = next((str(one.message) for one in said if "synchroniz" in str(one.message)), None)
    for one in said:
        if "synchroniz" not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return result, waits


def capture(step: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of all that a step asks for; nothing of it runs before the graph is replayed."""
    graph, here, collecting = torch.cuda.CUDAGraph(), torch.cuda.current_stream(stream.device), gc.isenabled()
    gc.collect()
    gc.disable()  # what is freed during a capture may be a graph itself
    try:
        # thread_local: another thread prepares batches in pinned memory meanwhile.
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
