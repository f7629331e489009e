"""Run a function in several processes that train together, with the environment variables that torchrun sets.

The processes are forked from a server that has loaded torch, so they start at once.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["regard.runs.train", "torch.nn.parallel"])
SECONDS = 120.0  # time limit of a test, on a busy machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main(environment: Mapping[str, str], output: Path, function: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(output.with_suffix(".err"), "w") as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    result = function(*arguments)
    output.write_text(json.dumps(result))


class Ranks:
    """Processes that run the same function. Those whose rank is not in `present` are missing."""

    def __init__(
        self,
        folder: Path,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        present: Iterable[int] | None = None,
        timeout: float = 60.0,
        **environment: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.outputs = {rank: folder / f"rank-{rank}.json" for rank in (range(size) if present is None else present)}
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        common |= {"REGARD_RANK_TIMEOUT": str(timeout), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | environment
        self.processes: dict[int, Any] = {}
        for rank, output in self.outputs.items():
            output.unlink(missing_ok=True)
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes[rank] = SERVER.Process(target=_main, args=(own, output, function, arguments), daemon=True)
            self.processes[rank].start()

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    def running(self) -> bool:
        return any(process.is_alive() for process in self.processes.values())

    def codes(self, seconds: float = SECONDS) -> dict[int, int]:
        """Wait for all processes and return their exit codes. If one still runs after `seconds`, the test fails."""
        deadline = time.monotonic() + seconds
        try:
            for rank, process in self.processes.items():
                process.join(max(0.0, deadline - time.monotonic()))
                assert process.exitcode is not None, f"rank {rank} hangs: {self.errors(rank)}"
            return {rank: process.exitcode for rank, process in self.processes.items()}
        finally:
            for process in self.processes.values():
                process.kill()

    def errors(self, rank: int) -> str:
        """Return what a process has printed."""
        path = self.outputs[rank].with_suffix(".err")
        return path.read_text() if path.exists() else ""

    def results(self) -> list[Any]:
        """Wait for all processes, and return what their function has returned."""
        codes = self.codes()
        assert not any(codes.values()), {rank: self.errors(rank) for rank in codes}
        return [json.loads(output.read_text()) for output in self.outputs.values()]


def command(words: list[str]) -> None:
    """Run a command of regard in this process, and exit."""
    from regard import cli

    sys.argv = ["regard", *words]
    cli.main()
