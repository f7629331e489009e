"""Join a group of processes that train together: find the rank, the device and the other processes.

The environment variables are those of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

import json
import math
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[reportPrivateImportUsage]

from regard.errors import RegardError, SpecError

TIMEOUT = "REGARD_RANK_TIMEOUT"  # environment variable: seconds until a rank that does not answer counts as lost
DEFAULT_TIMEOUT = 600.0
POLL = 0.02  # seconds between two looks at the store
LOST = ("gloo", "nccl", "connection", "timed out", "collective", "socket")  # in messages about a lost rank


class RankError(RegardError, RuntimeError):
    """Raised if the ranks cannot start, if one is missing, or if the connection to a rank is lost."""


class OtherRankError(RankError):
    """Raised on the ranks that stop because another rank has failed; that rank reports the reason."""


def launched() -> bool:
    """Return whether torchrun, or another launcher with the same environment variables, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_rank() -> int:
    """Return the rank of this process, or 0 if it trains alone."""
    return number_in("RANK") if launched() else 0


def launch_name() -> str | None:
    """Return the name that torchrun has given to this launch, or None if it has no name of its own."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def timeout_seconds() -> float:
    """Return the number of seconds after which a rank that does not answer counts as lost."""
    text = os.environ.get(TIMEOUT, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds < 1e6:
        raise SpecError(TIMEOUT, f"{text!r} is not a number of seconds from 1 to 1,000,000; leave it unset for 600")
    return seconds


def number_in(variable: str) -> int:
    """Return the number in an environment variable; raise an error if it holds none."""
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise RankError(f"{variable} is {text!r}, not a number; start the processes with torchrun")
    return int(text)


def device_of(kind: str, rank: int) -> torch.device:
    """Return the device of this process. On CUDA, this is the GPU whose index is the local rank."""
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise SpecError("--device", f"several processes train on cpu or cuda, not on {kind}; choose one of them")
    local = number_in("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    gpus = torch.cuda.device_count()
    if local >= gpus:
        raise RankError(
            f"rank {rank} is process {local + 1} of its machine, which has {gpus} GPU{'s' * (gpus != 1)}; start at "
            "most one process per GPU (--nproc-per-node), or train with --device cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def connected(rank: int, size: int, timeout: float) -> Store:
    """Return the store through which processes meet. torchrun or rank 0 holds it."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise RankError(f"MASTER_ADDR is {host!r} and MASTER_PORT is {port!r}; start the processes with torchrun")
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if not holds:
            _wait_for(host, int(port), timeout)  # torch would print a backtrace
        store = TCPStore(
            host, int(port), size, holds, timeout=timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        what = "open" if holds else "reach"
        raise RankError(
            f"rank {rank} of {size} could not {what} {host}:{port}, where the processes meet, within {timeout:.0f} s "
            f"({first_line(error)}); check that rank 0 runs, and --master-addr and --master-port"
        ) from None
    return PrefixStore(f"regard/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _wait_for(host: str, port: int, timeout: float) -> None:
    """Wait until a process accepts connections at an address; raise OSError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), max(1.0, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(10 * POLL)
        else:
            return


def meet(store: Store, rank: int, size: int, timeout: float) -> None:
    """Wait until every process has joined; raise an error if processes are missing or have contradictory settings."""
    store.set(f"joined/{rank}", json.dumps({"WORLD_SIZE": size, "version of torch": torch.__version__}))
    missing, deadline = list(range(size)), time.monotonic() + timeout
    while missing:
        missing = [other for other in missing if not store.check([f"joined/{other}"])]
        if missing and time.monotonic() > deadline:
            raise RankError(
                f"rank {rank} waited {timeout:.0f} s ({TIMEOUT}) for {size} processes (WORLD_SIZE), but "
                f"{', '.join(f'rank {other}' for other in missing[:8])} did not start; start exactly {size} processes"
            )
        _compare(store, rank, size, [other for other in range(size) if other not in missing])
        time.sleep(POLL if missing else 0)


def _compare(store: Store, rank: int, size: int, present: Sequence[int]) -> None:
    """Raise an error if another process has a different number of processes or another version of torch."""
    own = {"WORLD_SIZE": size, "version of torch": torch.__version__}
    for other in present:
        about = json.loads(store.get(f"joined/{other}"))
        for name, value in own.items():
            if about[name] != value:
                raise RankError(
                    f"{name} is {value} on rank {rank} but {about[name]} on rank {other}; make them the same everywhere"
                )


def is_lost(error: RuntimeError) -> bool:
    """Return whether an error of torch is about the connection between processes."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in LOST)


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, shortened."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")[:160]
