"""Ensembles: decode with several models as if they were one model."""

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
from regard.nn.checks import require


@dataclass(frozen=True, slots=True)
class Decodings:
    """The decoding states (such as key-value caches) of all models in an ensemble."""

    members: tuple[Decoding, ...]

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Reorder the states of the beams: new beam i continues beam `parent[i]`, which has the same source."""
        for decoding in self.members:
            decoding.reorder(parent)

    def droppable(self) -> bool:
        """Return whether sources can be dropped from the states of all models."""
        return all(decoding.droppable() for decoding in self.members)

    def keep(self, sources: Int[Tensor, " s"]) -> None:
        """Keep the states of the sources with the given indices, and drop all other sources."""
        for decoding in self.members:
            decoding.keep(sources)

    def watch(self) -> None:
        """Start recording attention weights."""
        for decoding in self.members:
            decoding.trace = Trace()

    def attention(self) -> Float[Tensor, "B S"]:
        """Return the attention weights of the last output token over the source tokens, and clear the record.

        The weights are averaged over the heads of the last layer and over the models.
        """
        layers = []
        for decoding in self.members:
            assert decoding.trace is not None
            recorded = decoding.trace.weights.get("decoder.cross")
            if not recorded:
                raise SpecError(
                    "coverage", "the coverage penalty needs cross-attention, which this model lacks; set it to 0"
                )
            layers.append(recorded[-1][:, :, -1].mean(1))
            decoding.trace.clear()
        if len({attention.shape for attention in layers}) > 1:
            raise SpecError("coverage", "these models read sources of different lengths; set it to 0")
        return torch.stack(layers).mean(0)


class Ensemble:
    """Several models whose probabilities are averaged.

    With n models m, the log-probability of token v is log(sum_m p_m(v) / n). The models share a vocabulary. Each model
    has its own decoding state.
    """

    def __init__(self, models: Generator | Sequence[Generator]) -> None:
        self.models = (models,) if isinstance(models, Generator) else tuple(models)
        if not self.models:
            raise SpecError("models", "a search needs at least one model")
        message = "is in training mode, in which dropout makes the search random; call eval() first"
        for i, model in enumerate(self.models):
            require(not model.training, f"models[{i}]", message)

    @property
    def device_search(self) -> Any:
        """The beam search that runs as a CUDA graph, or None if any of the models lacks it."""
        searches = [model.device_search for model in self.models]
        return None if None in searches else searches[0]

    def check_prefill(self) -> None:
        """Raise SpecError if a model cannot process a long input in pieces."""
        for model in self.models:
            require(
                model.one_piece is None,
                "prefill_chunk",
                f"this model cannot read its input in pieces: {model.one_piece}; leave it out",
            )

    def start(
        self, batch: Batch, max_len: int, beams: int = 1, static: bool = False, prefill_chunk: int | None = None
    ) -> Decodings:
        """Return the initial decoding states of all models, with room for `max_len` tokens.

        Inputs are processed in pieces of at most `prefill_chunk` tokens.
        """
        options: dict[str, Any] = {} if prefill_chunk is None else {"prefill_chunk": prefill_chunk}
        return Decodings(tuple(model.start(batch, max_len, beams, static, **options) for model in self.models))

    def advance(
        self, ids: Int[Tensor, "B T"], decodings: Decodings, seg: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        """Feed new tokens to all models and return the log-probabilities of the next token in a new tensor."""
        pairs = zip(self.models, decodings.members, strict=True)
        log_probs = [model.advance(ids, decoding, seg) for model, decoding in pairs]
        sizes = [each.shape[-1] for each in log_probs]
        if len(set(sizes)) > 1:
            raise DataError(f"models: an ensemble needs one vocabulary, not vocabularies of {sizes} tokens")
        if len(log_probs) == 1:
            return log_probs[0]
        return torch.stack(log_probs).logsumexp(0) - math.log(len(log_probs))
