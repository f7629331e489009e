"""The attention weights and the hidden states of one forward pass through a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.batch import Batch
from regard.models.base import Model
from regard.models.hidden_states import recorded_states
from regard.nn.trace import Trace


def attention(model: Model, batch: Batch) -> dict[str, list[Float[Tensor, "B H T S"]]]:
    """Return the attention weights of every layer, keyed by `encoder.self`, `decoder.self` and `decoder.cross`.

    Row t of a matrix (T, S) is the distribution of query t over S keys. In `decoder.cross` the keys are the tokens of
    the source; otherwise they are the tokens of the sequence itself. A decoder-only translator has one sequence: the
    source, then the target. A Linformer attends to mixtures of all tokens; its weights are named `encoder.mixtures`.
    The weights of padded queries are meaningless. A model without attention gives {}.
    """
    trace = Trace()
    with evaluation(model):
        model(batch, trace=trace)
    return trace.weights


def hidden_states(model: Model, batch: Batch) -> dict[str, list[Float[Tensor, "B T D"]]]:
    """Return the hidden states, keyed by `encoder` and `decoder`: the input of the first layer, then all layer outputs.

    In a Transformer with a final norm, the last entry is the output of the final norm. Layers may differ in width (in
    convolutional and recurrent models) and in length (in a funnel Transformer).
    """
    with evaluation(model), recorded_states(model) as states:
        model(batch)
    return states


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Context manager that disables dropout and gradients, and restores the mode of every module at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
