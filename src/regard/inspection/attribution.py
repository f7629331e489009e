"""Contrastive attribution: which input tokens make a model prefer one next token to another (gradient x input)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.batch import Batch
from regard.errors import DataError
from regard.inspection.importance import without_gradients
from regard.inspection.interventions import temporary_attribute
from regard.models.base import LanguageModel
from regard.models.baselines.convs2s import ConvS2SEncoder


def contrast(
    model: LanguageModel, batch: Batch, position: int, token: int, foil: int
) -> dict[str, Float[Tensor, "B T"]]:
    """Return how much each input token contributes to logit(token) - logit(foil) of the next token at `position`.

    The contribution of a token is the gradient of this difference with respect to its embedding, times the embedding
    (gradient x input; Yin and Neubig 2022). Embeddings include the position vectors that are added to them. The result
    has the keys "source" (if the model reads one) and "target". Tokens of the target after `position` contribute 0. For
    a head that is not a single softmax, log-probabilities replace logits.
    """
    T = batch.target.shape[1]
    if not 0 <= position < T:
        raise DataError(f"position: {position} is not a position of the target, 0 .. {T - 1}")
    with without_gradients(model), true_gradients(model), recorded_embeddings(model) as embeddings, torch.enable_grad():
        logits = model.logits(batch)[:, position]
        if not all(0 <= each < logits.shape[-1] for each in (token, foil)):
            raise DataError(f"token: {token} and {foil} must be ids of the vocabulary, 0 .. {logits.shape[-1] - 1}")
        difference = (logits[:, token] - logits[:, foil]).sum()
        gradients = torch.autograd.grad(difference, list(embeddings.values()), allow_unused=True)
    return {
        side: x.detach()[..., 0] * 0 if gradient is None else (gradient * x.detach()).sum(-1)
        for (side, x), gradient in zip(embeddings.items(), gradients, strict=True)
    }


@contextmanager
def recorded_embeddings(model: LanguageModel) -> Iterator[dict[str, Tensor]]:
    """Context manager that yields a dict of the embeddings of each forward pass, keyed by side.

    The embeddings are detached and become leaves of the autograd graph, so that their gradients can be computed.
    """
    embeddings: dict[str, Tensor] = {}
    original = model.embed

    def embed(side: Any, *inputs: Any) -> Tensor:
        embeddings[side] = original(side, *inputs).detach().requires_grad_()
        return embeddings[side]

    with temporary_attribute(model, "embed", embed):
        yield embeddings


@contextmanager
def true_gradients(model: LanguageModel) -> Iterator[None]:
    """Context manager that disables the gradient scaling of ConvS2S, which is meant for training."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, ConvS2SEncoder):
                stack.enter_context(temporary_attribute(module, "factor", 1.0))
        yield
