"""The processes (ranks) that train one model together: how they join, exchange numbers, wait for each other, and fail.

A process belongs to a group if the environment variables RANK and WORLD_SIZE are set, as torchrun does. The processes
exchange small numbers through gloo on the CPU, also if they train on GPUs. If a process dies, gloo notices the closed
connection at once, whereas NCCL waits until its timeout.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[reportPrivateImportUsage]

from regard.errors import RegardError
from regard.training.parallel.joining import (
    POLL,
    OtherRankError,
    RankError,
    connected,
    device_of,
    first_line,
    is_lost,
    launched,
    meet,
    number_in,
    timeout_seconds,
)

Value = TypeVar("Value")

BEAT = 1.0  # seconds between two signs of life of rank 0 while the other ranks wait for it
SILENT = 60.0  # seconds without a sign of life after which rank 0 counts as lost, if the timeout is not shorter
LINGER = 2.0  # seconds for which a failed rank 0 holds the store, so that the others find out why it stops


class Group:
    """The group of a process that trains alone. The subclass `ProcessGroup` has several processes."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None  # None: the device of the model
    restarted: bool = False  # True: torchrun has started these processes again after a failure

    @property
    def leads(self) -> bool:
        """True on rank 0, which writes all files, validates, and decides when training ends."""
        return self.rank == 0

    def sums(self, values: Sequence[float | int]) -> list[float]:
        """Return the elementwise sums over all ranks."""
        return [float(value) for value in values]

    def first(self, values: Sequence[float | int]) -> list[float]:
        """Return the values of rank 0 on every rank."""
        return [float(value) for value in values]

    def alone(self, function: Callable[[], Value]) -> Value:
        """Call a function on rank 0 while the others wait; return its value, a JSON value, on every rank."""
        return function()

    def reason(self, why: str | None) -> str | None:
        """Return the reason of the lowest rank that has one, or None if no rank has one."""
        return why

    def failed_elsewhere(self, wait: float = 0.0) -> bool:
        """Return whether another rank has failed, or fails within `wait` seconds."""
        del wait
        return False


ALONE = Group()


@contextmanager
def joined(kind: str) -> Iterator[Group]:
    """Yield the group of this process. `kind` is the type of device on which it trains: cpu, cuda or mps.

    An error inside the `with` block is stored for the other ranks, so that they stop at once. An error of torch about a
    lost connection becomes a `RankError`.
    """
    if not launched():
        yield ALONE
        return
    try:
        group = ProcessGroup.join(kind)
    except RuntimeError as error:
        if isinstance(error, RegardError) or not is_lost(error):
            raise
        raise RankError(f"{first_line(error)}; start all processes again") from None
    try:
        yield group
        group.leave()
    except BaseException as error:
        translated = group.failure(error)
        if translated is error:
            raise
        raise translated from None
    # After an error the process ends soon; ending the group in order could wait for the rank that is lost.
    dist.destroy_process_group()


class ProcessGroup(Group):
    """Several processes that train one model together. Every process calls the same methods in the same order."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store, timeout: float) -> None:
        self.rank, self.size, self.device, self.store, self.timeout = rank, size, device, store, timeout
        self.restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        self.control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.turn = 0

    @classmethod
    def join(cls, kind: str) -> "ProcessGroup":
        """Connect to the other processes, which the environment variables of torchrun describe."""
        rank, size, timeout = number_in("RANK"), number_in("WORLD_SIZE"), timeout_seconds()
        if not 0 <= rank < size:
            raise RankError(f"RANK is {rank}, but WORLD_SIZE is {size}; ranks lie between 0 and {size - 1}")
        device = device_of(kind, rank)
        store = connected(rank, size, timeout)
        meet(store, rank, size, timeout)
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            store=PrefixStore("torch", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=device if kind == "cuda" else None,
        )
        return cls(rank, size, device, store, timeout)

    def sums(self, values: Sequence[float | int]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(total, group=self.control)
        return total.tolist()

    def first(self, values: Sequence[float | int]) -> list[float]:
        return self.sums(values if self.leads else [0.0] * len(values))

    def alone(self, function: Callable[[], Value]) -> Value:
        self.turn += 1
        key = f"value/{self.turn}"
        if self.leads:
            with self.beating():
                value = function()
            self.store.set(key, json.dumps(value))
        return json.loads(self._awaited(key))

    def reason(self, why: str | None) -> str | None:
        flags = self.sums([float(why is not None and rank == self.rank) for rank in range(self.size)])
        if not any(flags):
            return None
        self.turn += 1
        key, lowest = f"reason/{self.turn}", flags.index(1.0)
        if lowest == self.rank:
            self.store.set(key, why or "")
        return self._awaited(key)

    def leave(self) -> None:
        """Leave the group. Rank 0, which may hold the store, waits for the others."""
        self.store.set(f"left/{self.rank}", "")
        self._wait_until_left(self.timeout)

    def _wait_until_left(self, seconds: float) -> None:
        """If this is rank 0, which may hold the store, wait until all other ranks have left, for at most `seconds`."""
        others, deadline = [f"left/{rank}" for rank in range(1, self.size)], time.monotonic() + seconds
        while self.leads and not self.store.check(others) and time.monotonic() < deadline:
            time.sleep(POLL)

    def failure(self, error: BaseException) -> BaseException:
        """Store an error for the other ranks, and return the error that this rank should raise."""
        if isinstance(error, OtherRankError | GeneratorExit):
            with suppress(RuntimeError):
                self.store.set(f"left/{self.rank}", "")
            return error
        lost = isinstance(error, RuntimeError) and not isinstance(error, RegardError) and is_lost(error)
        if lost and self.failed_elsewhere(wait=2 * BEAT):
            return self.failure(OtherRankError(f"rank {self.rank} stops, because another rank has failed"))
        with suppress(RuntimeError):  # the store is lost, too
            self.store.set("failed", str(self.rank))
            dist.destroy_process_group(self.control)  # interrupts the others, which then look into the store
            self.control = None
            self._wait_until_left(LINGER)
        if not lost:
            return error
        return RankError(
            f"rank {self.rank} of {self.size} lost the connection to another rank ({first_line(error)}); continue "
            "from the last checkpoint with regard resume"
        )

    def failed_elsewhere(self, wait: float = 0.0) -> bool:
        deadline = time.monotonic() + wait
        while True:
            with suppress(RuntimeError):
                if self.store.check(["failed"]):
                    return self.store.get("failed").decode() != str(self.rank)
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats in the background, so that the other ranks wait as long as this process lives."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT):
                with suppress(RuntimeError):
                    self.store.add("beats", 1)

        thread = threading.Thread(target=beat, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _awaited(self, key: str) -> str:
        """Wait for a key in the store, and return its value. Raise an error if another rank fails or is silent."""
        patience = max(min(self.timeout, SILENT), 3 * BEAT)
        beats, heard, pause = -1, time.monotonic(), POLL
        while not self.store.check([key]):
            if self.failed_elsewhere():
                raise OtherRankError(f"rank {self.rank} stops, because another rank has failed")
            now = self.store.add("beats", 0)
            if now != beats:
                beats, heard = now, time.monotonic()
            if time.monotonic() - heard > patience:
                raise RankError(
                    f"rank {self.rank} of {self.size} waited {patience:.0f} s for a sign of life of another rank; "
                    "continue from the last checkpoint with regard resume"
                )
            time.sleep(pause)
            pause = min(2 * pause, 10 * POLL)
        return self.store.get(key).decode()
