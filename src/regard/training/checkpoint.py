"""The run folder: what training leaves on disk. safetensors and JSON, written whole or not at all; nothing is pickled.

    recipe.json                 the resolved recipe: all that is needed to rebuild the model
    tokenizer.json              or tokenizer.source.json and tokenizer.target.json
    weights-00001000.safetensors, trainer-00001000.safetensors, trainer-00001000.json      a checkpoint
    weights-final.safetensors   what translate, generate and classify use once training is done
    log.jsonl environment.json  what happened, and where
    data/                       the token store, needed only to resume

A checkpoint exists once its JSON does, which is written last and names the digests of the other two files.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import DataError, RegardError

FORMAT = 1  # of the run folder; a newer one is refused
FINAL = "weights-final.safetensors"
Tensors = Mapping[str, Tensor]


class SaveError(RegardError, OSError):
    """Nothing could be written; what was there before is intact."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that can be resumed from."""

    step: int
    state: dict[str, Any]


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.json"

    @property
    def asked(self) -> Path:
        """The recipe as it was asked for, before anything was chosen."""
        return self.path / "asked.json"

    @property
    def data(self) -> Path:
        """The token store."""
        return self.path / "data"

    @property
    def log(self) -> Path:
        """One JSON object a line."""
        return self.path / "log.jsonl"

    def weights(self, step: int) -> Path:
        """The weights of a checkpoint."""
        return self.path / f"weights-{step:08d}.safetensors"

    def trainer(self, step: int, suffix: str) -> Path:
        """What else is needed to resume from it."""
        return self.path / f"trainer-{step:08d}.{suffix}"

    @property
    def final(self) -> Path:
        """The weights that the run is for."""
        return self.path / FINAL

    def steps(self) -> list[int]:
        """The steps whose weights are kept, oldest first."""
        return sorted(int(path.stem.split("-")[1]) for path in self.path.glob("weights-[0-9]*.safetensors"))

    def save(self, step: int, weights: Tensors, trainer: Tensors, state: Mapping[str, Any]) -> None:
        """Write a checkpoint: into a temporary folder, to the disk, then under its name; the JSON last."""
        with self._making() as making:
            write_tensors(making / "weights", weights)
            write_tensors(making / "trainer", trainer)
            digests = {name: file_digest(making / name) for name in ("weights", "trainer")}
            write_text(making / "state", json.dumps({"format": FORMAT, "step": step, "sha256": digests} | dict(state)))
            (making / "weights").rename(self.weights(step))
            (making / "trainer").rename(self.trainer(step, "safetensors"))
            sync(self.path)
            (making / "state").rename(self.trainer(step, "json"))
            sync(self.path)

    def save_final(self, weights: Tensors, about: Mapping[str, str]) -> None:
        """Write the weights that the run is for."""
        with self._making() as making:
            write_tensors(making / "weights", weights, about)
            (making / "weights").rename(self.final)
            sync(self.path)

    @contextmanager
    def _making(self) -> Iterator[Path]:
        making = self.path / ".saving"
        try:
            shutil.rmtree(making, ignore_errors=True)  # left by a process that was killed
            making.mkdir()
            yield making
        except (OSError, SafetensorError) as error:
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            what = "the disk is full" if full else str(error)
            raise SaveError(
                f"cannot save to {self.path}: {what}; make room, the last checkpoint is intact, regard resume goes on"
            ) from None
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint."""
        for path in sorted(self.path.glob("trainer-*.json"), reverse=True):
            state = read_json(path)
            if state.get("format", 0) > FORMAT:
                raise DataError(newer(self.path, state["format"]))
            if not {"step", "sha256"} <= state.keys():
                raise DataError(f"{path} is no checkpoint of this format; restore it from a copy")
            return Checkpoint(state["step"], state)
        return None

    def load(self, checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and trainer state of a checkpoint, both checked against its digests."""
        loaded = []
        for name, path in (
            ("weights", self.weights(checkpoint.step)),
            ("trainer", self.trainer(checkpoint.step, "safetensors")),
        ):
            if not path.exists():
                raise DataError(f"{path} is missing; the checkpoint of step {checkpoint.step} is damaged")
            if file_digest(path) != checkpoint.state["sha256"][name]:
                raise DataError(
                    f"{path} is not what was saved; restore it, or remove {self.trainer(checkpoint.step, 'json')}"
                )
            loaded.append(read_tensors(path))
        return loaded[0], loaded[1]

    def prune(self, keep: Iterable[int], latest: int) -> None:
        """Remove the weights of checkpoints not in `keep`, and what resuming needs of all but the latest."""
        kept = {*keep, latest}
        for step in self.steps():
            if step != latest:
                for suffix in ("json", "safetensors"):  # the JSON first: without it there is no checkpoint
                    self.trainer(step, suffix).unlink(missing_ok=True)
            if step not in kept:
                self.weights(step).unlink(missing_ok=True)


def newer(path: Path, version: int) -> str:
    """What to say of a run that this version cannot read."""
    return f"{path} was written in format {version} by a newer regard; this one reads up to {FORMAT}: upgrade regard"


def write_tensors(path: Path, tensors: Tensors, about: Mapping[str, str] | None = None) -> None:
    """A safetensors file, on the disk when this returns."""
    held = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    save_file(held, path, metadata={"format": "pt"} | dict(about or {}))
    path.chmod(0o644)  # the library writes for the owner alone
    sync(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{path} is damaged or no safetensors file ({error}); restore it from a copy") from None


def read_about(path: Path) -> dict[str, str]:
    """The notes in the header of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{path} is damaged or no safetensors file ({error}); restore it from a copy") from None


def write_text(path: Path, text: str) -> None:
    """A text file, on the disk when this returns."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """A JSON file, whole or not at all."""
    making = path.with_name(f".{path.name}-making")
    try:
        write_text(making, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        making.rename(path)
        sync(path.parent)
    except OSError as error:
        making.unlink(missing_ok=True)
        raise SaveError(f"cannot write {path}: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); restore it from a copy") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} does not hold an object; restore it from a copy")
    return value


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_digest(weights: Tensors) -> str:
    """The SHA-256 of weights: of names, types, shapes and values in order of name, whatever file they are in."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def mean(weights: Iterable[Tensors]) -> dict[str, Tensor]:
    """The mean of several sets of weights, summed in float64."""
    total: dict[str, Tensor] = {}
    first: Tensors = {}
    count = 0
    for each in weights:
        first = first or each
        if {name: t.shape for name, t in each.items()} != {name: t.shape for name, t in first.items()}:
            raise DataError("weights of different models cannot be averaged")
        for name, tensor in each.items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
        count += 1
    return {name: (tensor / count).to(first[name].dtype) for name, tensor in total.items()}
