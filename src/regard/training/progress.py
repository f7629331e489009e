"""The training state that checkpoints store, and the choice of the checkpoint to use before training has finished."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from regard.data.loader import Place
from regard.errors import DataError
from regard.training.checkpoint import Checkpoint, RunFolder
from regard.training.ranking import Metrics
from regard.training.spec import TrainSpec

ADDED_LATER = {"reached", "clock", "validation", "steps", "skipped", "parts"}  # fields that older checkpoints lack


@dataclass
class Progress:
    """The training state that a checkpoint stores beside the weights and the optimizer state."""

    step: int = 0
    place: Place = Place()
    labels: int = 0  # number of labels trained on so far
    seconds: float = 0.0  # time spent on steps
    saved: list[int] = field(default_factory=list)  # steps of the regular checkpoints, oldest first
    scores: dict[int, Metrics] = field(default_factory=dict)  # metrics of validated steps whose weights may be kept
    best: list[int] = field(default_factory=list)  # validated steps, best first
    reached: Metrics = field(default_factory=dict)  # the best value of the criterion and of the loss so far
    stale: int = 0  # validations since the criterion or the loss last improved
    scaler: dict[str, float] = field(default_factory=dict)  # state of the loss scaling in float16
    clock: float = 0.0  # wall-clock seconds of all sessions, including validation and saving
    validation: float = 0.0  # duration of the last validation in seconds
    steps: int = 0  # the step at which training ends; a time budget changes it
    skipped: int = 0  # number of steps up to now, without a gap, that were skipped because they were not finite
    parts: dict[str, int] = field(default_factory=dict)  # shape of batches that lack memory -> number of parts

    def record(self) -> dict[str, Any]:
        """Return the training state as a JSON-compatible dict."""
        return asdict(self) | {"scores": {str(step): scores for step, scores in self.scores.items()}}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Progress":
        """Return the training state stored in a JSON-compatible dict."""
        # Older checkpoints have fewer fields.
        values = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        scores = {int(step): scores for step, scores in values["scores"].items()}
        return cls(**values | {"place": Place(**values["place"]), "scores": scores})

    @classmethod
    def read(cls, folder: RunFolder, checkpoint: Checkpoint) -> "Progress":
        """Return the training state stored in a checkpoint; raise DataError if a field is missing or malformed."""
        try:
            progress = cls.of(checkpoint.state)
            numbers = all(
                type(step) is int
                for step in (*progress.saved, *progress.best, progress.stale, *progress.parts.values())
            )
            complete = {*cls.__dataclass_fields__} - ADDED_LATER <= checkpoint.state.keys()
            if numbers and complete and {*progress.best} <= progress.scores.keys():
                return progress
        except (KeyError, TypeError, ValueError, AttributeError):
            pass
        path = folder.trainer(checkpoint.step, "json")
        raise DataError(f"{path} is damaged or lacks data that resuming needs; restore it from a copy")


def newest_best(spec: TrainSpec, latest: int, best: list[int], validated: list[int]) -> int:
    """Return the step of the checkpoint to use before training has finished.

    If `spec.choose` is "best", and an earlier validated step is better than the last one, the best checkpoint is used.
    Otherwise the latest checkpoint is used. Averaged weights of several checkpoints are never used, because they have
    not been validated. As long as weights change a lot, averaged weights are far worse than those of the last
    checkpoint.
    """
    return best[0] if spec.choose == "best" and best and best[0] != max(validated) else latest
