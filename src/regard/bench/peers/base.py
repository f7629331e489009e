"""The interface of a peer's code to a race."""

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
    """A peer is unknown, not installed, or takes no part in this task."""


def library(name: str) -> Any:
    """Import a module of a peer, untyped: few users have all of them installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise PeerError(f"{name} does not import ({error}); name the other peers by --against") from error


@dataclass(frozen=True)
class TrainingModel:
    """A model to be trained, and its loss."""

    title: str
    model: nn.Module
    prepare: Callable[[Batch], Any]  # the input of its loss; made before anything is timed
    loss: Callable[[Any], Tensor]  # the mean over real tokens, with label smoothing
    copied: bool = False  # it has our weights, so its loss must equal ours
    pure_half: bool = False  # on a GPU also raced with all weights in bfloat16


@dataclass(frozen=True)
class DecodingModel:
    """A model that translates: `search(sources, beams, length)` returns exactly `length` ids for each source."""

    title: str
    parameters: int
    search: Callable[[Ids, int, int], Ids]


def smoothed(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """torch's cross-entropy with label smoothing; labels of padding are IGNORED."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)


def columns(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The source, its mask of real tokens, the input of the decoder, and labels in which padding is IGNORED."""
    assert batch.source is not None
    assert batch.source_seg is not None
    assert batch.labels is not None
    assert batch.target_seg is not None
    return batch.source, batch.source_seg != 0, batch.target, batch.labels.masked_fill(batch.target_seg == 0, IGNORED)


def count(model: nn.Module) -> int:
    """The number of trained parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
