"""Rows 48, 49 and 52 of Narang et al. 2021: mixtures of experts, and a product-key memory."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from regard.errors import SpecError, join
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.experts import MixtureOfExperts, Switch
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.product_key import ProductKeyMemory
from regard.nn.stacks.plain import Plain
from regard.tree import swap, walk
from regard.variants.base import Variant

Make = Callable[[FeedForward], BranchSpec]
EVERY = 4


def mixture_of_experts(m: Any) -> Any:
    """Replace every fourth feed-forward layer by 32 experts with half the hidden width. Each token uses two experts.

    As published, experts have ReLU and no biases, whatever the base has. The decoder has a lower capacity than the
    encoder because of a misspelt line in the published configuration.
    """

    def make(capacity: float) -> Make:
        return lambda f: MixtureOfExperts(d_hidden=max(1, _hidden(f, m) // 2), capacity=capacity)

    return _every_fourth(m, MixtureOfExperts, {"encoder": make(2.0), "decoder": make(1.25)})


def switch(m: Any) -> Any:
    """Replace every fourth feed-forward layer by 32 experts with the same hidden width. Each token uses one expert."""

    def make(capacity: float) -> Make:
        return lambda f: Switch(d_hidden=_hidden(f, m), capacity=capacity)

    return _every_fourth(m, Switch, {"encoder": make(1.2), "decoder": make(1.25)})


def product_key_memory(m: Any) -> Any:
    """Replace the feed-forward layer of the second-to-last decoder layer by a product-key memory.

    In an encoder-only model, the memory is in the second-to-last encoder layer. The paper uses 512 * 512 values for 12
    layers of width 768; here the number of values is proportional to depth * d_model. Keys have d_model / 6
    dimensions, but at least 8.
    """
    side = "decoder" if getattr(m, "decoder", None) is not None else "encoder"
    stack = _plain(m, side)
    keys = max(4, round(512 * math.sqrt(stack.depth / 12 * m.d_model / 768)))
    memory = ProductKeyMemory(keys=keys, d_key=2 * max(4, m.d_model // 12), knn=min(32, keys))
    layers = {max(0, stack.depth - 2)}
    return replace(m, **{side: _placed(stack, side, ProductKeyMemory, layers, stack.depth, lambda _: memory)})


def _hidden(f: FeedForward, m: Any) -> int:
    return f.d_hidden or 4 * m.d_model


def _plain(m: Any, side: str) -> Plain:
    stack = getattr(m, side)
    if not isinstance(stack, Plain):
        raise SpecError(side, f"must be a plain stack to change some of its layers, not {stack.kind!r}")
    return stack


def _every_fourth(m: Any, kind: type[BranchSpec], makes: dict[str, Make]) -> Any:
    """Replace the feed-forward layers in layers 4, 8, 12, ..., or in the last layer if a stack has fewer than four."""
    changes = {}
    for side, make in makes.items():
        if getattr(m, side, None) is None:
            continue
        stack = _plain(m, side)
        layers = set(range(EVERY - 1, stack.depth, EVERY)) or {stack.depth - 1}
        length = math.lcm(len(stack.pattern), EVERY) if stack.depth >= EVERY else stack.depth
        changes[side] = _placed(stack, side, kind, layers, min(length, stack.depth), make)
    return replace(m, **changes)


def _placed(stack: Plain, side: str, kind: type[BranchSpec], layers: Collection[int], length: int, make: Make) -> Plain:
    """Replace the feed-forward module f of the given layers by `make(f)`, in a pattern of `length` blocks to repeat."""
    pattern = []
    for layer in range(length):
        block = stack.pattern[layer % len(stack.pattern)]
        if layer in layers and not _has(block, kind):
            changed = swap(block, FeedForward, make)
            if changed is block:
                where = join(side, f"pattern[{layer % len(stack.pattern)}]")
                raise SpecError(where, f"layer {layer + 1} has no feed-forward to replace; choose a base that has one")
            block = changed
        pattern.append(block)
    placed = replace(stack, pattern=tuple(pattern))
    replaced = {layer for layer in range(stack.depth) if _has(placed.block_of(layer), kind)}
    if stack.unique not in (None, stack.depth) and replaced != set(layers):
        names = ", ".join(str(layer + 1) for layer in sorted(layers))
        raise SpecError(
            join(side, "unique"),
            f"{stack.unique} blocks are shared by {stack.depth} layers, so {kind.kind!r} cannot be in layer "
            f"{names} alone; leave it out",
        )
    return placed


def _has(block: Block, kind: type[BranchSpec]) -> bool:
    return any(isinstance(part, kind) for part in walk(block))


VARIANTS = {
    "mixture_of_experts": Variant(
        mixture_of_experts, "experts", "two of 32 experts in every fourth feed-forward", "Shazeer et al. 2017"
    ),
    "switch": Variant(switch, "experts", "one of 32 experts in every fourth feed-forward", "Fedus et al. 2022"),
    "product_key_memory": Variant(
        product_key_memory,
        "experts",
        "a memory of 512 x 512 keys instead of one feed-forward of the decoder",
        "Lample et al. 2019",
    ),
}
