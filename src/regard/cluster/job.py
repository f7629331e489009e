"""A job of a cluster: a folder with a function call in JSON, and the process that makes this call on a node.

    job.json         the function, its arguments, the environment variables and the version of the code
    submitted.json   the scheduler and the identifiers of the submissions
    events.jsonl     the events of the job, one JSON object per line
    result.json      the returned value or the error; the job is finished if this file exists

The command line of the process is `python -m regard.cluster.job FOLDER`. Nothing is pickled: submitit's own `submit`
would pickle the function in this folder and unpickle it on the node.
"""

import hashlib
import importlib
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from regard.errors import DataError
from regard.files import append_text, locked, replace_text
from regard.processes import StoppedError, request_stop, sentence

STOPPED = 75  # exit code of a job that stopped early and can be continued: EX_TEMPFAIL
# The warning before a time limit or a preemption: SIGUSR2, or SIGUSR1 if SUBMITIT_PREEMPT_SIGNAL chooses it. Slurm also
# sends SIGTERM when a job is preempted or cancelled.
WARNINGS = ("SIGUSR1", "SIGUSR2", "SIGTERM")


@dataclass(frozen=True)
class JobFolder:
    """The folder of a job, on a file system that the submitting machine and the node share."""

    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def submitted(self) -> Path:
        return self.path / "submitted.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def write(self, job: dict[str, Any]) -> int:
        """Write the function call `job`, remove the result of an earlier submission, and return the size of the events.

        A process of an earlier submission that still runs is not ended. It holds the lock, and its result also counts
        as the result of the new submission.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.result.unlink(missing_ok=True)
        replace_text(self.job, json.dumps(job))
        return self.events.stat().st_size if self.events.exists() else 0

    def read_result(self) -> dict[str, Any] | None:
        """Return the result of a finished job, {"result": value} or {"error": sentence}; None if it is not finished."""
        with suppress(OSError, ValueError):
            result = json.loads(self.result.read_bytes())
            if isinstance(result, dict) and result.keys() & {"result", "error"}:
                return result
        return None

    def read_submissions(self) -> dict[str, Any]:
        """Return the scheduler and the identifiers of the submissions; empty if the job has not been submitted."""
        with suppress(OSError, ValueError):
            return json.loads(self.submitted.read_bytes())
        return {}

    def append(self, event: dict[str, Any]) -> None:
        """Append an event to the log of the job."""
        append_text(self.events, json.dumps(event) + "\n")

    def events_after(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Return the complete events after `offset` bytes of the log, and the offset of their end."""
        try:
            with open(self.events, "rb") as file:
                file.seek(offset)
                whole, end, _ = file.read().rpartition(b"\n")
        except OSError:  # no event yet
            return [], offset
        return list(_parsed(whole.split(b"\n"))), offset + len(whole) + len(end)


def _parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError):  # half a line, of a process that was killed while it wrote
            if isinstance(event := json.loads(line), dict):
                yield event


def call(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the identifier of a function call, which is a digest of the call and of the code, and the call as JSON."""
    record = {"function": function, "args": args, "kwargs": kwargs, "code": code()}
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16], record


@cache
def code() -> str:
    """Return the digest of the source files of regard, so that a node with other code refuses the job."""
    digest, root = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def run(folder: JobFolder) -> int:
    """Run the job in a folder, unless it is finished, and return the exit code of the process.

    The folder is locked, so that a job that is submitted twice runs once: the second process waits for the first.
    """
    if not folder.job.exists():
        raise DataError(f"{folder.job} does not exist on this node; use a folder that all nodes share")
    with locked(folder.path, wait=lambda: None):
        if folder.read_result() is not None:
            return 0
        job = json.loads(folder.job.read_bytes())
        folder.append({"started": {"host": platform.node(), "pid": os.getpid()}})
        os.environ.update(job["environment"])
        try:
            answer = {"result": _called(folder, job)}
        except StoppedError as stopped:
            folder.append({"stopped": str(stopped)})
            return STOPPED
        except Exception as error:
            answer = {"error": sentence(error)}
        replace_text(folder.result, json.dumps(answer))
        return 0


def _called(folder: JobFolder, job: dict[str, Any]) -> Any:
    if job["code"] != code():
        here = Path(__file__).resolve().parents[1]
        raise DataError(f"{platform.node()} has other code of regard in {here} than the machine that submitted the job")
    emits = {"emit": lambda event: folder.append({"event": event})} if job["emits"] else {}
    module, _, name = job["function"].partition(":")
    return getattr(importlib.import_module(module), name)(*job["args"], **job["kwargs"], **emits)


def _end_with(parent: int) -> None:
    """Exit when the parent process, submitit's local controller, has ended.

    If the controller is killed, it cannot end the job itself.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(STOPPED)


def main() -> None:
    """Run the job whose folder is the argument. After a warning signal, the job saves its state and stops."""
    for name in WARNINGS:
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, lambda number, _: request_stop(signal.Signals(number).name))
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sys.exit(run(JobFolder(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
