"""The attention weights and the hidden states of one forward pass through a model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.batch import Batch
from regard.models.base import Model
from regard.nn.stacks.base import Stack
from regard.nn.trace import Trace

# The attributes that contain the layers of the encoder or decoder of a convolutional or recurrent model.
LAYER_LISTS = ("blocks", "layers", "cells")


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
def recorded_states(
    model: Model, claim: Callable[[Tensor, int, str], None] | None = None
) -> Iterator[dict[str, list[Float[Tensor, "B _T _D"]]]]:
    """Context manager that records the hidden states of each forward pass in the dict that it returns.

    `claim` is called with the input of the first layer, the number of hidden states to record, and "encoder" or
    "decoder", before the layers are computed.
    """
    states: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            side = name.partition(".")[0]
            if isinstance(module, Stack):
                number = getattr(model.spec, side).blocks() + 1
                added = _record_stack(module, side, states, partial(_claim, claim, number, side))
            elif module is getattr(model, side, None) and not any(isinstance(part, Stack) for part in module.modules()):
                lists = [getattr(module, kind) for kind in LAYER_LISTS if getattr(module, kind, None) is not None]
                added = (hook for layers in lists for hook in _record_layers(layers, side, states))
            else:
                continue
            for hook in added:
                hooks.callback(hook.remove)
        yield states


def _claim(claim: Callable[[Tensor, int, str], None] | None, number: int, side: str, x: Tensor) -> None:
    if claim is not None:
        claim(x, number, side)


def _record_stack(
    stack: Stack, side: str, states: dict[str, list[Tensor]], claim: Callable[[Tensor], None]
) -> Iterator[Any]:
    """Register and yield hooks that store the hidden states between the blocks of a stack in `states[side]`."""

    def keep(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        claim(args[0])
        return args, kwargs | {"keep": True}

    yield stack.register_forward_pre_hook(keep, with_kwargs=True)
    yield stack.register_forward_hook(lambda _, __, out: states.update({side: list(out.layers)}))


def _record_layers(layers: nn.ModuleList, side: str, states: dict[str, list[Tensor]]) -> Iterator[Any]:
    """Register and yield hooks that store the input of the first layer and all layer outputs in `states[side]`."""
    recorded: list[list[Tensor]] = [[] for _ in range(len(layers) + 1)]

    def record(layer: int, x: Any) -> None:
        recorded[layer].append(x[0] if isinstance(x, tuple) else x)  # recurrent layers return (outputs, last state)
        states[side] = [torch.cat(steps, 1) for steps in recorded if steps]  # recurrent decoders run step by step

    yield layers[0].register_forward_pre_hook(lambda _, args: record(0, args))
    for i, layer in enumerate(layers, start=1):
        yield layer.register_forward_hook(lambda _, __, out, i=i: record(i, out))


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
