"""Write the events of a training run to log.jsonl and to TensorBoard."""

import json
import math
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from regard.files import append_text, replace_text
from regard.training.checkpoint import cannot_save
from regard.training.trainer import Event


class Log:
    """Appends events to log.jsonl, one JSON object per line; NaN and infinities are written as null.

    When training resumes at `step`, lines from later steps are removed, because training repeats those steps.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        kept = []
        self.path = path
        try:
            if path.exists():
                with open(path, encoding="utf-8", errors="replace") as lines:
                    kept = [line for line in lines if _at(line) <= step]
            replace_text(path, "".join(kept))
        except OSError as error:
            raise cannot_save(path, error) from None

    def note(self, event: Event) -> None:
        """Append an event as a line."""
        try:
            append_text(self.path, json.dumps(_strict(event), allow_nan=False) + "\n")
        except OSError as error:
            raise cannot_save(self.path, error) from None


def _at(line: str) -> int | float:
    """Return the step of a line; infinity if the line is incomplete or not an event."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def _strict(value: Any) -> Any:
    """Return the value with None for every float that is not finite."""
    if isinstance(value, dict):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Writes the metrics of steps and validations as TensorBoard events."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # an optional dependency

        self.folder = folder
        _silence()
        with self._saved():
            self.writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    @staticmethod
    def installed() -> bool:
        """Return whether TensorBoard is installed (pip install 'regard[log]')."""
        return find_spec("tensorboard") is not None

    def note(self, event: Event) -> None:
        """Write all numbers in an event, if it is about a step or a validation."""
        with self._saved():
            if event["event"] in ("step", "valid"):
                for name, value in event.items():
                    if isinstance(value, int | float) and name not in ("step", "time"):
                        self.writer.add_scalar(f"{event['event']}/{name}", value, event["step"])
            if event["event"] == "valid":
                self.writer.flush()
            if event["event"] == "end":
                self.writer.close()

    @contextmanager
    def _saved(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_save(self.folder, error) from None


@cache
def _silence() -> None:
    """Suppress the traceback of TensorBoard's writer thread; the next call to the writer raises the same error."""
    previous = threading.excepthook

    def hook(died: Any) -> None:
        if not (isinstance(died.exc_value, OSError) and type(died.thread).__module__.startswith("tensorboard.")):
            previous(died)

    threading.excepthook = hook


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a result depends on in addition to its recipe: versions, machine and commit."""
    packages = ("regard", "torch", "numpy", "safetensors", "tokenizers", "sacrebleu")
    facts = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: version(name) for name in packages},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "command": sys.argv,
    }
    return facts | _commit()


def version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # the package is on the import path without being installed
        return None


def _commit() -> dict[str, str | None]:
    """Return the commit and the uncommitted changes of the git checkout of regard; None if there is no checkout.

    External diff programs and text conversions that the repository configures are not run. Filters that git needs to
    compare a file, such as LFS filters, are run. GIT_* variables, which a git hook sets, are ignored.
    """
    here = Path(__file__).resolve().parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    git_alone = ("git", "-c", "core.fsmonitor=false")

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                [*git_alone, *words], cwd=here, env=environment, capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    top = git("rev-parse", "--show-toplevel")
    if top is None or not here.is_relative_to(Path(top) / "src" / "regard"):
        return {"commit": None, "diff": None}
    return {
        "commit": git("rev-parse", "HEAD"),
        "diff": git("diff", "--no-ext-diff", "--no-textconv", "HEAD", "--", "src"),
    }
