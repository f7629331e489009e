"""What a peer's code gives to a race."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from regard.batch import Batch
from regard.errors import RegardError

Ids = list[list[int]]
IGNORED = -100


class PeerError(RegardError):
    """A peer that is not known, not installed, or does not do this."""


def library(name: str) -> Any:
    """A peer's module, imported when it is raced: nobody has all of them, and nothing is known of their types."""
    try:
        return import_module(name)
    except ImportError as error:
        raise PeerError(f"{name} does not import ({error}); name the other peers by --against") from error


@dataclass(frozen=True)
class Trainee:
    """A model to be trained, and its loss."""

    title: str
    model: nn.Module
    prepare: Callable[[Batch], Any]  # what its loss takes; made before anything is timed
    loss: Callable[[Any], Tensor]  # the mean over real tokens, with label smoothing
    copied: bool = False  # it has our weights, so its loss must be ours
    pure_half: bool = False  # on a GPU also with all weights in bfloat16


@dataclass(frozen=True)
class Speaker:
    """A model that says something about sources: `say(sources, beams, length)` is exactly `length` ids for each."""

    title: str
    parameters: int
    say: Callable[[Ids, int, int], Ids]


def smoothed(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """torch's cross-entropy, which is what one writes who has logits; labels of padding are IGNORED."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)


def columns(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source, which of it is real, what the decoder reads, and labels in which padding is IGNORED."""
    assert batch.source is not None
    assert batch.source_seg is not None
    assert batch.labels is not None
    assert batch.target_seg is not None
    return batch.source, batch.source_seg != 0, batch.target, batch.labels.masked_fill(batch.target_seg == 0, IGNORED)


def count(model: nn.Module) -> int:
    """Its trained parameters; shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
