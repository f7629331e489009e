"""CUDA graphs: test whether a step can be captured, capture it, and replay it.

If an operation waits for the device, a capture fails and leaves the allocator and the random number generators in an
invalid state. So a step first runs in a mode that reports such operations, and is captured only if there are none.
"""

import gc
import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")

_broken: list[torch.cuda.CUDAGraph] = []  # the graph of a failed capture must not be freed


def watched(step: Callable[[], Result]) -> tuple[Result, str | None]:
    """Run a step. Return its result, and torch's warning if an operation waited for the device, else None."""
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
    """Return a CUDA graph of the operations in `step`. They run only when the graph is replayed."""
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


class Graphed(Generic[Result]):
    """Callable that captures a function of fixed shapes as a CUDA graph in its first calls, and then replays the graph.

    The function is an argument of each call, so that this object has no reference to a model. On a CPU, and if the
    function cannot be captured, each call runs the function.
    """

    def __init__(
        self, stream: torch.cuda.Stream | None, pool: Any, refused: Callable[[str], None], first: bool = False
    ) -> None:
        """Set the stream for captures and the memory pool for graphs. If `stream` is None, nothing is captured.

        `refused` is called with the reason if the function cannot be captured. With `first`, the first call is neither
        tested nor captured, because it creates constants and therefore waits for the device.
        """
        self.stream, self.pool, self.refused, self.first = stream, pool, refused, first
        self.tested = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None

    def __call__(self, function: Callable[[], Result]) -> Result:
        if self.graph is not None:
            self.graph.replay()
        elif self.stream is None or self.first:
            self.first, self.result = False, function()
        elif self.tested:
            self._capture(function, self.stream)
        else:
            self._test(function, self.stream)
        return self.result

    def _test(self, function: Callable[[], Result], stream: torch.cuda.Stream) -> None:
        self.tested = True
        here = torch.cuda.current_stream(stream.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            self.result, waits = watched(function)
        here.wait_stream(stream)
        if waits is not None:
            self._refuse(waits)

    def _capture(self, function: Callable[[], Result], stream: torch.cuda.Stream) -> None:
        def step() -> None:
            self.result = function()

        try:
            graph = capture(step, stream, self.pool)
        except RuntimeError as error:
            self._refuse(str(error))
            torch.cuda.synchronize(stream.device)
            step()
            return
        graph.replay()
        self.graph = graph

    def _refuse(self, why: str) -> None:
        self.stream = None
        lines = why.splitlines() or ["no reason given"]
        self.refused(lines[0][:200])
