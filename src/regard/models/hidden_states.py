"""Record the hidden states between the layers of a model, with hooks, for every family of models."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.models.base import Model
from regard.nn.stacks.base import Stack

# The attributes that contain the layers of the encoder or decoder of a convolutional or recurrent model.
LAYER_LISTS = ("blocks", "layers", "cells")


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
