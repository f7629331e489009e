"""Watchers that write: the log of a run, and TensorBoard events."""

import json
import platform
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from regard.training.loop import Event


class Log:
    """log.jsonl: one JSON object a line. Lines after `step` are of a lost future and are taken out when resuming."""

    def __init__(self, path: Path, step: int = 0) -> None:
        kept = []
        if path.exists():
            with open(path, encoding="utf-8") as lines:
                kept = [line for line in lines if _whole(line) and json.loads(line)["step"] <= step]
        making = path.with_name(f".{path.name}-making")
        making.write_text("".join(kept), encoding="utf-8")
        making.rename(path)
        self.path = path

    def note(self, event: Event) -> None:
        """Append a line."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def _whole(line: str) -> bool:
    """Whether a line was written to its end, line feed and all."""
    try:
        return line.endswith("\n") and "step" in json.loads(line)
    except ValueError:
        return False


class TensorBoard:
    """Events that TensorBoard shows: everything measured, by step."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # an extra

        self.writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    @staticmethod
    def installed() -> bool:
        """Whether the package is there (pip install 'regard[log]')."""
        return find_spec("tensorboard") is not None

    def note(self, event: Event) -> None:
        """Write the numbers of steps and validations."""
        if event["event"] in ("step", "valid"):
            for name, value in event.items():
                if isinstance(value, int | float) and name not in ("step", "time"):
                    self.writer.add_scalar(f"{event['event']}/{name}", value, event["step"])
        if event["event"] == "valid":
            self.writer.flush()
        if event["event"] == "end":
            self.writer.close()


def environment(device: torch.device) -> dict[str, Any]:
    """What a result depends on besides its recipe: versions, machine, commit."""
    packages = ("regard", "torch", "numpy", "safetensors", "tokenizers", "sacrebleu")
    found = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: version(name) for name in packages},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "command": sys.argv,
    }
    return found | _commit()


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # on a path without being installed
        return None


def _commit() -> dict[str, str | None]:
    """Commit and changes of the checkout that regard runs from, if it is one."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    top = git("rev-parse", "--show-toplevel")
    if top is None or not here.is_relative_to(Path(top) / "src" / "regard"):
        return {"commit": None, "diff": None}
    return {"commit": git("rev-parse", "HEAD"), "diff": git("diff", "HEAD", "--", "src")}
