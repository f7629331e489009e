"""Activation checkpointing: activations of a block are not stored, but computed again in the backward pass."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.errors import SpecError
from regard.nn.block import BlockModule
from regard.nn.core import Reporting
from regard.nn.mask import Context, View
from regard.nn.trace import Trace


class CheckpointedBlock(BlockModule):
    """A block that stores only its input in training. The backward pass computes its activations again.

    This is the method of Chen et al. 2016. Dropout uses the same random numbers both times, so the gradients are the
    same to the last bit.
    """

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        if state is not None or not self.training or not torch.is_grad_enabled():
            return super().forward(x, ctx, state)
        before = copied(ctx, {})
        computed = False

        def run(x: Tensor) -> Tensor:
            nonlocal computed
            if computed:  # in the backward pass
                with unchanged_counts(self):
                    return BlockModule.forward(self, x, unrecorded(before))
            computed = True
            return BlockModule.forward(self, x, ctx)

        return checkpoint(run, x, use_reentrant=False)


def checkpoint_blocks(model: nn.Module) -> None:
    """Turn all blocks of a model into `CheckpointedBlock`s, in place. Raise SpecError if the model has no blocks."""
    blocks = [module for module in model.modules() if isinstance(module, BlockModule)]
    if not blocks:
        raise SpecError(
            "train.checkpoint_layers",
            "has no effect on this model, which has no blocks of the kind that can be computed again; set it to false",
        )
    for block in blocks:
        block.__class__ = CheckpointedBlock


def checkpoints_blocks(model: nn.Module) -> bool:
    """Return whether the blocks of a model are `CheckpointedBlock`s."""
    return any(isinstance(module, CheckpointedBlock) for module in model.modules())


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a context, view or dictionary, with copies of all views and dictionaries in it.

    Layers cache tensors, such as masks, in the dictionaries of a view. When a block is computed again, the cache must
    have the same content as before the first time, because autograd expects the same operations. `memo` maps the id of
    an object to its copy.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Mapping):
        memo[id(value)] = copy = {}
        copy.update((key, copied(each, memo)) for key, each in value.items())
        return copy
    if isinstance(value, Context | View):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        changes = {name: copied(part, memo) for name, part in parts.items() if isinstance(part, Mapping | View)}
        memo[id(value)] = replace(value, **changes)
        return memo[id(value)]
    return value


def unrecorded(ctx: Context) -> Context:
    """Return a copy of the context that discards auxiliary losses and traces, for computing a block again."""
    losses = None if ctx.losses is None else []
    return replace(copied(ctx, {}), losses=losses, trace=None if ctx.trace is None else Trace())


@contextmanager
def unchanged_counts(block: nn.Module) -> Iterator[None]:
    """Restore the counts that modules report, such as tokens per expert, at the end of a `with` block."""
    reporting = [module for module in block.modules() if isinstance(module, Reporting)]
    counts = [count for module in reporting for count in module.buffers(recurse=False)]
    before = [count.clone() for count in counts]
    try:
        yield
    finally:  # also if torch ends the second computation early, by an exception
        for count, old in zip(counts, before, strict=True):
            count.copy_(old)
