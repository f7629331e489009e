"""Choose the checkpoint from which training resumes: the newest one whose files are whole."""

from dataclasses import dataclass

from torch import Tensor

from regard.errors import DataError
from regard.training.checkpoint import Checkpoint, NewerFormatError, RunFolder
from regard.training.progress import Progress


@dataclass(frozen=True)
class Recovery:
    """A checkpoint that was read and verified, and the reasons why newer checkpoints cannot be used."""

    checkpoint: Checkpoint
    progress: Progress
    weights: dict[str, Tensor]
    trainer: dict[str, Tensor]
    damaged: tuple[str, ...] = ()  # a sentence for each newer checkpoint


def newest_whole(folder: RunFolder) -> Recovery | None:
    """Read the newest checkpoint that is neither damaged nor incomplete; return None if there is no checkpoint.

    Raise DataError if all checkpoints are damaged, or if a newer version of regard wrote them.
    """
    damaged: list[str] = []
    for step in reversed(folder.checkpoints()):
        try:
            checkpoint = folder.checkpoint(step)
            progress = Progress.read(folder, checkpoint)
            weights, trainer = folder.load(checkpoint)
            return Recovery(checkpoint, progress, weights, trainer, tuple(damaged))
        except NewerFormatError:
            raise
        except DataError as error:
            damaged.append(reason(error))
    if not damaged:
        return None
    others = "" if len(damaged) == 1 else f", and none of the {len(damaged)} checkpoints is whole"
    raise DataError(f"{damaged[0]}{others}; restore it from a copy")


def reason(error: DataError) -> str:
    """Return the message of an error about a damaged file, without the advice at its end."""
    return str(error).partition("; restore it")[0]
