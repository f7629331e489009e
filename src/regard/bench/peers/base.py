"""The interface between a benchmark and a peer: a library that regard is compared with."""

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
    """Raised if a peer (another library) is unknown, not installed, or does not support the task."""


def library(name: str) -> Any:
    """Import a module of a peer. The result is untyped, because few users have all peers installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise PeerError(f"{name} cannot be imported ({error}); install it, or list others with --against") from error


@dataclass(frozen=True)
class TrainingModel:
    """The model of a peer (another library) for the training benchmark, and the loss function of this model."""

    title: str
    model: nn.Module
    prepare: Callable[[Batch], Any]  # returns the input of `loss`; called before anything is timed
    loss: Callable[[Any], Tensor]  # the mean over tokens without padding, with label smoothing
    copied: bool = False  # the model has regard's weights, so its loss must equal regard's
    pure_half: bool = False  # on a GPU, also benchmark it with all weights in bfloat16


@dataclass(frozen=True)
class DecodingModel:
    """A model for the decoding benchmark: `search(sources, beams, length)` returns `length` token ids per source."""

    title: str
    parameters: int
    search: Callable[[Ids, int, int], Ids]


def smoothed(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return torch's cross-entropy with label smoothing. Padding has the label IGNORED and does not count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)


def columns(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (source ids, mask, decoder input ids, labels). The mask is True for source tokens, False for padding.

    Padding has the label IGNORED.
    """
    assert batch.source is not None
    assert batch.source_seg is not None
    assert batch.labels is not None
    assert batch.target_seg is not None
    return batch.source, batch.source_seg != 0, batch.target, batch.labels.masked_fill(batch.target_seg == 0, IGNORED)


def count(model: nn.Module) -> int:
    """Return the number of trainable parameters. A parameter that layers share counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
