"""Record what a model computes inside: the attention weights and the hidden states of one forward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.batch import Batch
from regard.models.base import Model
from regard.nn.stacks.base import Stack
from regard.nn.trace import Trace

LAYER_LISTS = ("blocks", "layers", "cells")  # of the sides of a convolutional or recurrent model


def attention(model: Model, batch: Batch) -> dict[str, list[Float[Tensor, "B H T S"]]]:
    """The attention weights of every layer, by kind: `encoder.self`, `decoder.self`, `decoder.cross`.

    Row t of a matrix is the distribution of query t over the keys: S tokens of the source in `decoder.cross`, else of
    the sequence itself. A decoder-only translator has one sequence: the source, then the target. Padded queries have
    weights too; ignore them. A model without attention returns no entries.
    """
    trace = Trace()
    with evaluation(model):
        model(batch, trace=trace)
    return trace.weights


def hidden_states(model: Model, batch: Batch) -> dict[str, list[Float[Tensor, "B T D"]]]:
    """The hidden states of `encoder` and `decoder`: the input of the first layer, then the output of every layer.

    The last entry of a Transformer has passed the final norm, if there is one. Layers may differ in width
    (convolutions, recurrences) and in length (a funnel).
    """
    states: dict[str, list[Tensor]] = {}
    hooks: list[Any] = []
    for name, module in model.named_modules():
        side = name.partition(".")[0]
        if isinstance(module, Stack):
            hooks += _record_stack(module, side, states)
        elif module is getattr(model, side, None) and not any(isinstance(part, Stack) for part in module.modules()):
            for layers in filter(None, (getattr(module, kind, None) for kind in LAYER_LISTS)):
                hooks += _record_layers(layers, side, states)
    try:
        with evaluation(model):
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def _record_stack(stack: Stack, side: str, states: dict[str, list[Tensor]]) -> Iterator[Any]:
    """Make a stack of blocks return the stream between its layers, and record it."""
    yield stack.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"keep": True}), with_kwargs=True)
    yield stack.register_forward_hook(lambda _, __, out: states.update({side: list(out.layers)}))


def _record_layers(layers: nn.ModuleList, side: str, states: dict[str, list[Tensor]]) -> Iterator[Any]:
    """Record the input of the first layer and the output of each; the steps of a recurrence are concatenated."""
    recorded: list[list[Tensor]] = [[] for _ in range(len(layers) + 1)]

    def record(layer: int, x: Any) -> None:
        recorded[layer].append(x)
        states[side] = [torch.cat(steps, 1) for steps in recorded if steps]

    yield layers[0].register_forward_pre_hook(lambda _, args: record(0, args[0]))
    for i, layer in enumerate(layers, start=1):
        yield layer.register_forward_hook(partial(_record_output, record, i))


def _record_output(record: Callable[[int, Any], None], layer: int, _module: nn.Module, _inputs: Any, out: Any) -> None:
    record(layer, out[0] if isinstance(out, tuple) else out)  # a recurrence returns its outputs and its last state


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
