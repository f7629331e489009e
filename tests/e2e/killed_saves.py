"""Train in child processes that are killed before each of their changes to the file system; print what remains as JSON.

Run as a program, so that it can fork while it has one thread. The first argument is an empty folder. For every number
n, a child trains a toy model and is killed by SIGKILL before its change number n: renaming, replacing, removing or
flushing a file. Then another child resumes and trains to the end.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from regard.training.checkpoint import RunFolder
from regard.training.recovery import newest_whole
from regard.training.tensor_files import read_about
from regard.training.trainer import Trainer
from tests.unit.training.test_trainer import bucketed, held_out_loss, spec_of, tiny

BOUNDARIES = ("rename", "replace", "unlink", "fsync")
LIMIT = 20  # seconds for one child
SPEC = spec_of(6, accumulate=2, validate_every=4, save_every=2, ema=0.7, average=2, patience=3)


def kill_before(number: int) -> None:
    """Kill this process before its `number`-th change to the file system."""
    changes = [0]

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **settings: Any) -> Any:
            changes[0] += 1
            if changes[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **settings)

        return run

    for name in BOUNDARIES:
        setattr(os, name, watched(getattr(os, name)))


def train(path: Path) -> None:
    trainer = Trainer(tiny(0.3), SPEC, bucketed(), RunFolder(path), held_out_loss)
    trainer.resume()
    trainer.fit()


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a child process, and return the exit status of the process."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def attempt(path: Path, number: int) -> dict[str, Any]:
    """Train until the kill, and then to the end; return what was found."""
    path.mkdir()

    def killed() -> None:
        kill_before(number)
        train(path)

    code = in_child(killed)
    folder = RunFolder(path)
    recovery = newest_whole(folder)
    found = {
        "code": code,
        "resumed": recovery.progress.step if recovery else 0,
        "damaged": list(recovery.damaged) if recovery else [],
        "finished": folder.final.exists(),
    }
    resumed = 0 if folder.final.exists() else in_child(lambda: train(path))
    return found | {"resumed_code": resumed, "sha256": read_about(folder.final)["sha256"]}


def main() -> None:
    torch.set_num_threads(1)
    base, results = Path(sys.argv[1]), list[dict[str, Any]]()
    for number in range(1, 1000):
        path = base / str(number)
        results.append(attempt(path, number))
        shutil.rmtree(path)
        if results[-1]["code"] == 0:  # the last one was not killed
            break
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
