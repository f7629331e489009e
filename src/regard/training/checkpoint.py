"""The files in the folder of a training run: safetensors and JSON, written atomically; nothing is pickled.

    request.json                the recipe as the user wrote it
    recipe.json                 the resolved recipe, from which the model is rebuilt
    tokenizer.json              or tokenizer.source.json and tokenizer.target.json
    checksums.json              checksums of the files above and of data/
    weights-00001000.safetensors, trainer-00001000.safetensors, trainer-00001000.json      a checkpoint
    weights-final.safetensors   the weights that commands use after training has finished
    log.jsonl environment.json  the events of training; versions, machine and commit
    baselines.json              metrics of trivial models on the validation text
    data/                       the token store, needed only to resume training

A checkpoint is complete if its JSON file exists, because that file is written last. The JSON file contains the digests
of the other two files, and a checksum of itself. The headers of all files with weights contain a digest, too. Writing
to the folder requires its lock (`regard.files.locked`); reading does not.
"""

import errno
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from regard.errors import DataError, RegardError
from regard.files import file_digest, replace_text, sync, temporary, write_text
from regard.training.tensor_files import CHECKSUM, Tensors, checksum, read_tensors, write_tensors, write_weights

FORMAT = 1  # version of the format of run folders; a newer version raises an error
FINAL = "weights-final.safetensors"
NESTED = 100  # maximum nesting depth of a JSON file, far more than regard writes
WRITTEN = re.compile(
    r"(asked|request|recipe|environment|baselines|checksums)\.json|tokenizer.*\.json|log\.jsonl|tensorboard"
    r"|(weights|trainer)-(\d+|final)\.\w+|skipped-\d+\.\w+"
)


class SaveError(RegardError, OSError):
    """Error for a file that could not be written. The previous version of the file is intact."""


class NewerFormatError(DataError):
    """Error for a checkpoint that a newer version of regard wrote."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The step and the trainer state of a checkpoint."""

    step: int
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Settings that determine when checkpoints are written."""

    min_seconds: float = 0.0  # minimum time between two checkpoints; a checkpoint that is due sooner is skipped
    final: bool = True  # True: write a checkpoint at the last step, and the final weights


class RunFolder:
    """The folder of a training run: the paths of its files, and methods that write and read checkpoints."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.json"
        self.checksums = self.path / "checksums.json"
        self.final = self.path / FINAL
        self.log = self.path / "log.jsonl"
        self.baselines = self.path / "baselines.json"
        self.data = self.path / "data"

    @property
    def request(self) -> Path:
        """The path of the recipe as the user wrote it. Earlier versions of regard named the file asked.json."""
        former = self.path / "asked.json"
        return former if former.exists() else self.path / "request.json"

    def writes(self, name: str) -> bool:
        """Return whether training writes files of this name. `data` is written only if there is no recipe.json yet."""
        return WRITTEN.fullmatch(name) is not None or (name == self.data.name and not self.recipe.exists())

    def weights(self, step: int) -> Path:
        """Return the path of the weights of the checkpoint at `step`."""
        return self.path / f"weights-{step:08d}.safetensors"

    def trainer(self, step: int, suffix: str) -> Path:
        """Return the path of the trainer state at `step`. `suffix` is "safetensors" (tensors) or "json" (the rest)."""
        return self.path / f"trainer-{step:08d}.{suffix}"

    def skipped(self, step: int, suffix: str) -> Path:
        """Return the path of the batches of a skipped step. `suffix` is "json" (text) or "safetensors" (tensors)."""
        return self.path / f"skipped-{step:08d}.{suffix}"

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints whose weights are in the folder, in ascending order."""
        return self._steps("weights-*", self.weights)

    def _steps(self, pattern: str, path_of: Callable[[int], Path]) -> list[int]:
        """Return the sorted steps in the names of files that match `pattern`, if the file `path_of(step)` exists."""
        numbers = (re.search(r"-(\d+)\.", path.name) for path in self.path.glob(pattern))
        return sorted(step for step in {int(number[1]) for number in numbers if number} if path_of(step).exists())

    def save(self, step: int, weights: Tensors, trainer: Tensors, state: Mapping[str, Any]) -> None:
        """Write a checkpoint atomically: write all files to a temporary folder, then rename them, the JSON last."""
        with self._temporary_folder() as folder:
            write_weights(folder / "weights", weights)
            write_tensors(folder / "trainer", trainer)
            digests = {name: file_digest(folder / name) for name in ("weights", "trainer")}
            record = {"format": FORMAT, "step": step, "sha256": digests} | dict(state)
            write_text(folder / "state", json.dumps(record | {CHECKSUM: checksum(record)}))
            self.trainer(step, "json").unlink(missing_ok=True)  # of a damaged checkpoint that is replaced
            (folder / "weights").rename(self.weights(step))
            (folder / "trainer").rename(self.trainer(step, "safetensors"))
            sync(self.path)
            (folder / "state").rename(self.trainer(step, "json"))
            sync(self.path)

    def save_final(self, weights: Tensors, about: Mapping[str, str]) -> None:
        """Write the final weights, with the metadata `about` in the header of the file."""
        with self._temporary_folder() as folder:
            write_weights(folder / "weights", weights, about)
            (folder / "weights").rename(self.final)
            sync(self.path)

    @contextmanager
    def _temporary_folder(self) -> Iterator[Path]:
        folder = temporary(self.path / "checkpoint")
        with saving(self.path):
            try:
                folder.mkdir(0o700)
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def checkpoints(self) -> list[int]:
        """Return the steps of the complete checkpoints, in ascending order."""
        return self._steps("trainer-*.json", lambda step: self.trainer(step, "json"))

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None if there is no checkpoint."""
        steps = self.checkpoints()
        return self.checkpoint(steps[-1]) if steps else None

    def checkpoint(self, step: int) -> Checkpoint:
        """Return a complete checkpoint, after verifying the checksum of its JSON file."""
        path = self.trainer(step, "json")
        state = read_json(path)
        version, digests = state.get("format", 0), state.get("sha256")
        if isinstance(version, int) and version > FORMAT:
            raise NewerFormatError(newer(self.path, version))
        if CHECKSUM in state and state.pop(CHECKSUM) != checksum(state):
            raise DataError(f"{path} has changed since it was saved; restore it from a copy")
        complete = isinstance(version, int) and isinstance(digests, dict) and {"weights", "trainer"} <= digests.keys()
        if not complete or state.get("step") != step:
            raise DataError(f"{path} is not a checkpoint of this format; restore it from a copy")
        return Checkpoint(step, state)

    def load(self, checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the weights and the trainer tensors of a checkpoint, after checking the digests of the files."""
        step = checkpoint.step
        paths = {"weights": self.weights(step), "trainer": self.trainer(step, "safetensors")}
        for name, path in paths.items():
            if not path.exists():
                raise DataError(
                    f"{path} is missing, so the checkpoint of step {step} is unusable; restore it from a copy"
                )
            if file_digest(path) != checkpoint.state["sha256"][name]:
                raise DataError(f"{path} has changed since it was saved; restore it from a copy")
        return read_tensors(paths["weights"]), read_tensors(paths["trainer"])

    def prune(self, keep: Iterable[int], latest: int, resumable: int = 1) -> None:
        """Delete old checkpoints. The last `resumable` ones up to the step `latest` are kept as a whole.

        The weights of the steps `keep` and `latest` are also kept. So are the weights to which the kept checkpoints
        refer, because training needs them after it resumes.
        """
        states = [step for step in self.checkpoints() if step <= latest][-resumable:]
        kept = {*keep, *states, latest}
        for step in states:
            with suppress(DataError, TypeError):  # a damaged checkpoint is not resumed
                state = self.checkpoint(step).state
                kept |= {*state.get("saved", ()), *state.get("best", ())}
        for step in self.steps():
            if step not in states:
                for suffix in ("json", "safetensors"):  # the JSON file first: a checkpoint without it does not count
                    self.trainer(step, suffix).unlink(missing_ok=True)
            if step not in kept:
                self.weights(step).unlink(missing_ok=True)


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Inside a `with` block, convert write errors to a SaveError that names `path` and advises to resume training."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        what = "the disk is full" if full else getattr(error, "strerror", None) or str(error)
        advice = "free disk space, then continue from the last checkpoint with regard resume"
        raise SaveError(f"cannot save to {path}: {what}; {advice}") from None


def newer(path: Path, version: Any) -> str:
    """Return the error message for the folder of a training run that a newer version of regard wrote."""
    return f"{path} was written in format {version} by a newer regard; this one reads up to {FORMAT}: upgrade regard"


def json_text(value: Any) -> str:
    """Return a JSON value as the text of a file."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    try:
        replace_text(path, json_text(value))
    except OSError as error:
        raise SaveError(f"cannot write {path}: {error.strerror}") from None


def finite(value: Any) -> Any:
    """Return a copy of a JSON value in which NaN and infinities are replaced by None (null)."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if _nested(value):
            raise RecursionError
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); restore it from a copy") from None
    except RecursionError:
        raise DataError(
            f"{path} is nested more deeply than any file that regard writes; restore it from a copy"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{path} does not contain a JSON object; restore it from a copy")
    return value


def _nested(value: Any, levels: int = NESTED) -> bool:
    """Return whether the nesting depth of a JSON value is at least `levels`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_nested(each, levels - 1) for each in inner)
