"""The peak memory of a computation: what torch allocates on CUDA, and the tensors that are alive at once on a CPU."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.bench.race import wait


class LiveTensors(TorchDispatchMode):
    """Context manager that counts the bytes of all live tensors that were created inside the context.

    `peak` is the largest number of bytes at any time. Tensors that share memory count once. Tensors created before do
    not count, and neither does temporary memory inside an operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._add(tensor, 0)  # if it was not made here, neither were its views
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._add(tensor, tensor.untyped_storage().nbytes())
        return result

    def _add(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            self.known[key] = weakref.ref(storage, lambda _: self._free(key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        self.known.pop(key, None)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """Call `work` and return its peak memory in bytes, in addition to the memory that was in use before.

    On CUDA, this is the memory of torch's allocator. On a CPU, it is that of `LiveTensors`, because the memory of the
    process also depends on what the allocator keeps.
    """
    if device.type != "cuda":
        with LiveTensors() as tensors:
            work()
        return tensors.peak
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before
