"""Ensemble: several models that act as one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.batch import Batch
from regard.errors import DataError, SpecError
from regard.models.base import Generator, Trace
from regard.models.decoding import Decoding


@dataclass(frozen=True, slots=True)
class Decodings:
    """The states of all members, moved together."""

    members: tuple[Decoding, ...]

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Row i continues row parent[i], a beam of the same source."""
        for decoding in self.members:
            decoding.reorder(parent)

    def droppable(self) -> bool:
        """Whether all of them can forget sources."""
        return all(decoding.droppable() for decoding in self.members)

    def keep(self, sources: Int[Tensor, " s"]) -> None:
        """Only these sources go on."""
        for decoding in self.members:
            decoding.keep(sources)

    def watch(self) -> None:
        """Record attention from now on."""
        for decoding in self.members:
            decoding.trace = Trace()

    def looked(self) -> Float[Tensor, "B S"]:
        """What the last token read looked at in the source: the last layer's weights, their mean over all heads.

        An ensemble looks where its members look on average. What was recorded is forgotten.
        """
        weights = []
        for decoding in self.members:
            assert decoding.trace is not None
            recorded = decoding.trace.weights.get("decoder.cross")
            if not recorded:
                raise SpecError("coverage", "this model has no cross-attention to penalise; set it to 0")
            weights.append(recorded[-1][:, :, -1].mean(1))
            decoding.trace.weights.clear()
        if len({attention.shape for attention in weights}) > 1:
            raise SpecError("coverage", "these models see sources of different lengths; set it to 0")
        return torch.stack(weights).mean(0)


class Ensemble:
    """The mean of the members' probabilities: log p(v) = log((1 / n) sum_m p_m(v)). One vocabulary, one state each."""

    def __init__(self, models: Generator | Sequence[Generator]) -> None:
        self.models = (models,) if isinstance(models, Generator) else tuple(models)
        if not self.models:
            raise SpecError("models", "a search needs at least one model")
        for i, model in enumerate(self.models):
            if model.training:
                raise SpecError(
                    f"models[{i}]", "is in training mode, where dropout makes every search another; call eval() first"
                )

    @property
    def device_search(self) -> Any:
        """The beam search that stays on the GPU, if every member has one installed."""
        searches = [model.device_search for model in self.models]
        return None if None in searches else searches[0]

    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decodings:
        """Begin a decoding of at most `max_len` read tokens in every member."""
        return Decodings(tuple(model.start(batch, max_len, beams, static) for model in self.models))

    def advance(
        self, ids: Int[Tensor, "B T"], decodings: Decodings, seg: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        """Read new tokens and return log p of what follows. The result belongs to the caller, who may write into it."""
        said = [model.advance(ids, state, seg) for model, state in zip(self.models, decodings.members, strict=True)]
        sizes = [log_probs.shape[-1] for log_probs in said]
        if len(set(sizes)) > 1:
            raise DataError(f"models: an ensemble needs one vocabulary, not vocabularies of {sizes} tokens")
        if len(said) == 1:
            return said[0]
        return torch.stack(said).logsumexp(0) - math.log(len(said))
