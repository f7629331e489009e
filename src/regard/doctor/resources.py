"""The memory that a process may use, the disk space that a run folder needs, and the free disk space."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from regard.errors import DataError
from regard.planner.speed import memory
from regard.training.checkpoint import RunFolder
from regard.training.trainer import Trainer


def available_memory(device: torch.device) -> int:
    """Return the bytes that a process may use: free GPU memory, or the available main memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    return int(min(memory(device), *_limits()))


def _limits() -> Iterator[float]:
    """Yield the available memory of the system, and the memory left under the limit of the control group (cgroup)."""
    with_default = float("inf")
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        yield 1024.0 * int(rows["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):
        yield with_default
    group = Path("/sys/fs/cgroup")
    try:
        yield float((group / "memory.max").read_text()) - float((group / "memory.current").read_text())
    except (OSError, ValueError):  # there is no control group, or it has no limit ("max")
        yield with_default


def disk_space(trainer: Trainer, folder: RunFolder) -> tuple[int, int]:
    """Return the bytes of one checkpoint and of the whole run folder."""
    spec = trainer.spec
    weights = sum(tensor.nbytes for tensor in trainer.model.state_dict().values())
    state = sum(tensor.nbytes for tensor in trainer.optimizer.state().values()) + weights * bool(spec.ema)
    data = sum(path.stat().st_size for path in folder.data.rglob("*") if path.is_file())
    every = spec.validate_every or spec.save_every or spec.steps or 1
    kept = min(spec.keep + spec.average, max(1, (spec.steps or 0) // every))
    # One more checkpoint while it is written beside the previous one; and the final weights.
    return weights + state, (kept + 2) * weights + (spec.keep_state + 1) * state + data


def free_space(folder: str | Path = ".") -> int:
    """Return the free bytes of the file system of a folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from None
