"""Write checkpoints in a background thread, so that training does not wait for the disk.

A checkpoint is copied to host memory at its step, and the thread writes the copy. At most one checkpoint is being
written; the next one waits for it.
"""

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import Tensor

PATIENCE = 2.0  # seconds that an interruption waits for a checkpoint that is being written


class BackgroundSaver:
    """Runs one function at a time in a background thread, and raises its error in the thread that uses the saver.

    As a context manager, it waits at the end of the `with` block until the function has returned. If the block ends
    with an interruption (an exception that is not an `Exception`), it waits at most `PATIENCE` seconds.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  # duration of the last function
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Run `write` in the background as soon as the previous function has returned; raise the error of that one."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            write()
        except BaseException as error:  # raised by `check`
            self._error = error
        self.seconds = time.perf_counter() - began

    def check(self) -> None:
        """Raise the error of a function that has failed. This does not wait for a function that is running."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is None and self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait until the function has returned, and raise its error."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def __enter__(self) -> "BackgroundSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:  # the error that ends the block is raised, not that of the thread
            self._thread.join(None if issubclass(kind, Exception) else PATIENCE)


class HostCopy:
    """Copies of tensors in host memory. Training may change the tensors at once, even if they are on a GPU."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to copy. From a GPU, the copy runs on the current stream, before the work that is launched later."""
        self._copies = {name: _copy(tensor.detach()) for name, tensor in tensors.items()}
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies, after waiting for them if they are copied from a GPU."""
        for event in self._copied:
            event.synchronize()
        return self._copies


def _copy(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:  # a copy to memory that is not pinned would wait for the GPU
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
