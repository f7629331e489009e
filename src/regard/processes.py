"""A pool of worker processes with the interface of `concurrent.futures`.

`ProcessPool.submit(function, *arguments)` calls a module-level function in another process and returns a Future. The
pool differs from `ProcessPoolExecutor` as follows. If a worker dies, only the job of this worker fails, and the worker
is replaced. Each worker has its own environment variables. Leaving the `with` block ends all workers at once. A worker
exits when its parent process is killed. Nothing is imported from the working folder or from the main script. Functions
are sent by name, and arguments and results as JSON, one object per line; nothing is pickled. `regard.cluster` runs the
same jobs on other machines.
"""

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, ClassVar

from regard.errors import RegardError, lacks_memory


def python(module: str) -> list[str]:
    """Return the command that runs a module of regard in a new process of this Python.

    `-m` alone puts the working folder first on the import path, so that a file `torch.py` in it would be imported
    instead of torch. `-P` excludes the working folder; PYTHONPATH is used as usual.
    """
    return [sys.executable, "-P", "-m", module]


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class JobError(RegardError):
    """Raised if a job fails with an exception. The message is one sentence."""


class StoppedError(RegardError):
    """Raised by a job that saved its state and stopped after `request_stop`. Running it again continues it."""


_stop_requests: list[str] = []  # why this process should save its state and stop


def request_stop(why: str) -> None:
    """Ask the job of this process to save its state and stop, for example shortly before a time limit."""
    _stop_requests.append(why)


def stop_requested() -> str | None:
    """Return why the job of this process should save its state and stop, or None."""
    return _stop_requests[0] if _stop_requests else None


class WorkerDiedError(JobError):
    """Raised if the worker process ends before its job is finished."""

    def __init__(self, code: int, output: str) -> None:
        self.code = code
        if code == -signal.SIGKILL:
            super().__init__("its process was killed, perhaps because memory ran out")
        else:
            super().__init__(f"its process ended with code {code}" + (f": {output}" if output else ""))

    @property
    def how(self) -> str:
        """How the process ended: `was killed by signal 9`, or `ended with code 1`."""
        return f"was killed by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"


class ProcessPool(ThreadPoolExecutor):
    """An executor with one worker process for each set of environment variables. A worker starts with its first job.

    Each worker has its own thread in the executor, which waits for the results.
    """

    command: ClassVar[Sequence[str]] = python("regard.processes")

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        super().__init__(len(environments), initializer=self._assign)
        self.workers = [Worker(self.command, environment) for environment in environments]
        self._free = list(self.workers)
        self._mine = threading.local()

    def _assign(self) -> None:
        self._mine.worker = self._free.pop()

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, on_event: Callable[[Any], None] | None = None, **kwargs: Any
    ) -> Future[Any]:
        """Call `fn(*args, **kwargs)` in a worker. `fn` must be a module-level function with JSON values as arguments.

        With `on_event`, `fn` also receives a function `emit`. Every JSON value that `fn` emits is passed to
        `on_event`, which runs in this process, in another thread.
        """
        function, emits = f"{fn.__module__}:{fn.__qualname__}", on_event is not None
        job = json.dumps({"function": function, "args": args, "kwargs": kwargs, "emits": emits})
        return super().submit(self._run, job, on_event or (lambda _: None))

    def _run(self, job: str, on_event: Callable[[Any], None]) -> Any:
        return self._mine.worker.run(job, on_event)

    def __exit__(self, *_: object) -> None:
        """End all workers at once, including busy ones. Results that have not been retrieved are lost."""
        self.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.close()
        self.shutdown()
        for worker in self.workers:
            worker.reap()


class Worker:
    """A worker process that runs jobs one after the other. If the process has died, the next job starts a new one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.command, self.environment = command, environment
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None  # what the process writes to stderr
        self.closed = False
        self.changing = threading.Lock()  # held while the process is started or ended

    def run(self, job: str, on_event: Callable[[Any], None]) -> Any:
        """Send a job and return its result; raise `JobError` if it fails."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):  # a broken pipe: the worker has died, and reading its output will fail
            process.stdin.write(job + "\n")
            process.stdin.flush()
        while True:
            try:
                message = json.loads(process.stdout.readline())
            except (OSError, ValueError):  # the output has ended, or is not JSON
                raise self._died(process) from None
            if "event" in message:
                on_event(message["event"])
            elif "error" in message:
                raise JobError(message["error"])
            else:
                return message["result"]

    def _running(self) -> "subprocess.Popen[str]":
        with self.changing:
            if self.process is not None and self.process.poll() is not None:
                self.reap()
            if self.closed:
                raise JobError("its pool was closed")
            if self.process is None:
                self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.errors,
                    env=os.environ | self.environment,
                    text=True,
                    encoding="utf-8",
                )
            return self.process

    def _died(self, process: "subprocess.Popen[str]") -> WorkerDiedError:
        with self.changing:
            if not self.closed:
                with suppress(subprocess.TimeoutExpired):  # the output may end a moment before the process
                    process.wait(1)
            process.kill()
            code, last = process.wait(), ""
            if self.errors is not None:
                self.errors.seek(0)
                last = next((line.strip() for line in reversed(self.errors.readlines()) if line.strip()), "")
            self.reap()
        return WorkerDiedError(code, last)

    def close(self) -> None:
        """End the process at once and allow no new process."""
        with self.changing:
            self.closed = True
            if self.process is not None:
                self.process.kill()

    def reap(self) -> None:
        """Kill the process, wait until it has ended, and close its pipes."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, self.errors):
                with suppress(OSError):  # a pipe to a dead process cannot be flushed
                    if pipe is not None:
                        pipe.close()


def main() -> None:
    """Run jobs from standard input. Exit at once when standard input ends, which also happens if the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent decides
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # libraries that print to stdout now print to stderr, not between results
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(jobs,), daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    while True:
        job = json.loads(jobs.get())
        emits = {"emit": lambda event: send({"event": event})} if job["emits"] else {}
        try:
            module, _, name = job["function"].partition(":")
            function = getattr(importlib.import_module(module), name)
            send({"result": function(*job["args"], **job["kwargs"], **emits)})
        except Exception as error:
            send({"error": sentence(error)})


def _receive(jobs: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


def sentence(error: Exception) -> str:
    """Return an error as one line: the message of a RegardError, or the type and first line of any other error."""
    if isinstance(error, RegardError):
        return str(error)
    if lacks_memory(error) or type(error).__name__ == "OutOfMemoryError":  # torch has its own class
        return "out of memory"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


if __name__ == "__main__":
    main()
