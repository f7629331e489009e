"""Write the events of a training run to log.jsonl and to TensorBoard."""

import json
import math
import os
import platform
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from regard.files import append_text, replace_text
from regard.training.checkpoint import finite, saving
from regard.training.trainer import Event


class Log:
    """Appends events to log.jsonl, one JSON object per line; NaN and infinities are written as null.

    When training resumes at `step`, lines from later steps are removed, because training repeats those steps.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        kept = []
        self.path = path
        with saving(path):
            if path.exists():
                with open(path, encoding="utf-8", errors="replace") as lines:
                    kept = [line for line in lines if _step_of(line) <= step]
            replace_text(path, "".join(kept))

    def note(self, event: Event) -> None:
        with saving(self.path):
            append_text(self.path, json.dumps(finite(event), allow_nan=False) + "\n")


def _step_of(line: str) -> int | float:
    """Return the training step of a line in log.jsonl, or infinity if the line is incomplete or not an event."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        if line.endswith("\n") and isinstance(step := json.loads(line)["step"], int):
            return step
    return math.inf


class TensorBoard:
    """Writes the metrics of training steps and validations as TensorBoard events."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # an optional dependency

        self.folder = folder
        _silence()
        with saving(folder):
            self.writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    @staticmethod
    def installed() -> bool:
        """Return whether TensorBoard is installed (pip install 'regard[log]')."""
        return find_spec("tensorboard") is not None

    def note(self, event: Event) -> None:
        """Write all numbers of an event if it is a "step" or "valid" event; ignore other events."""
        with saving(self.folder):
            if event["event"] in ("step", "valid"):
                for name, value in event.items():
                    if isinstance(value, int | float) and name not in ("step", "time"):
                        self.writer.add_scalar(f"{event['event']}/{name}", value, event["step"])
            if event["event"] == "valid":
                self.writer.flush()
            if event["event"] == "end":
                self.writer.close()


@cache
def _silence() -> None:
    """Suppress the traceback of TensorBoard's writer thread; the next call to the writer raises the same error."""
    previous = threading.excepthook

    def hook(failure: Any) -> None:
        of_tensorboard = type(failure.thread).__module__.startswith("tensorboard.")
        if not (of_tensorboard and isinstance(failure.exc_value, OSError)):
            previous(failure)

    threading.excepthook = hook


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions, the machine and the commit, on which the result of training depends besides the recipe."""
    packages = ("regard", "torch", "numpy", "safetensors", "tokenizers", "sacrebleu")
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: version(name) for name in packages},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "command": sys.argv,
        **_commit(),
    }


def version(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # the package is on the import path without being installed
        return None


def _commit() -> dict[str, str | None]:
    """Return the commit ("commit") and the uncommitted changes ("diff") of regard's git checkout, or None for both.

    External diff programs and text conversions that the repository configures are not run. Filters that git needs to
    compare a file, such as LFS filters, are run. GIT_* variables, which a git hook sets, are ignored.
    """
    here = Path(__file__).resolve().parent
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str | None:
        command = ["git", "-c", "core.fsmonitor=false", *arguments]
        try:
            return subprocess.run(
                command, cwd=here, env=env, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    top = git("rev-parse", "--show-toplevel")
    if top is None or not here.is_relative_to(Path(top) / "src" / "regard"):
        return {"commit": None, "diff": None}
    return {
        "commit": git("rev-parse", "HEAD"),
        "diff": git("diff", "--no-ext-diff", "--no-textconv", "HEAD", "--", "src"),
    }
