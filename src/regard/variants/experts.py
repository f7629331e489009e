"""Rows 48, 49 and 52: feed-forwards that are many, or a memory."""

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
from regard.variants.base import Row, Variant

Make = Callable[[FeedForward], BranchSpec]
EVERY = 4


def mixture_of_experts(m: Any) -> Any:
    """Two of 32 experts instead of every fourth feed-forward, each of half its hidden width.

    Experts are ReLU without biases, as run, whatever the feed-forwards of the base are. The decoder's lower capacity
    is a misspelt line of the published configuration, and what was run.
    """

    def make(capacity: float) -> Make:
        return lambda f: MixtureOfExperts(d_hidden=max(1, _hidden(f, m) // 2), capacity=capacity)

    return _every_fourth(m, MixtureOfExperts, {"encoder": make(2.0), "decoder": make(1.25)})


def switch(m: Any) -> Any:
    """One of 32 experts instead of every fourth feed-forward, each of its hidden width; experts as above."""

    def make(capacity: float) -> Make:
        return lambda f: Switch(d_hidden=_hidden(f, m), capacity=capacity)

    return _every_fourth(m, Switch, {"encoder": make(1.2), "decoder": make(1.25)})


def product_key_memory(m: Any) -> Any:
    """A memory instead of the feed-forward of the last decoder layer but one (or the only one).

    An encoder-only model has it in its encoder. The paper's 512 * 512 values at 12 layers of width 768; elsewhere
    their number grows with depth * d_model, so that the memory keeps its proportion to all layers; keys are d_model / 6
    wide, and at least 8.
    """
    side = "decoder" if getattr(m, "decoder", None) is not None else "encoder"
    stack = _plain(m, side)
    keys = max(4, round(512 * math.sqrt(stack.depth / 12 * m.d_model / 768)))
    memory = ProductKeyMemory(keys=keys, d_key=2 * max(4, m.d_model // 12), knn=min(32, keys))
    wanted = {max(0, stack.depth - 2)}
    return replace(m, **{side: _placed(stack, side, ProductKeyMemory, wanted, stack.depth, lambda _: memory)})


def _hidden(f: FeedForward, m: Any) -> int:
    return f.d_hidden or 4 * m.d_model


def _plain(m: Any, side: str) -> Plain:
    stack = getattr(m, side)
    if not isinstance(stack, Plain):
        raise SpecError(side, f"only the layers of a plain stack can be told apart, not of {stack.kind!r}")
    return stack


def _every_fourth(m: Any, kind: type[BranchSpec], makes: dict[str, Make]) -> Any:
    """Layers 4, 8, 12, ... of every stack; the last one of a stack that is not so deep."""
    changes = {}
    for side, make in makes.items():
        if getattr(m, side, None) is None:
            continue
        stack = _plain(m, side)
        wanted = set(range(EVERY - 1, stack.depth, EVERY)) or {stack.depth - 1}
        length = math.lcm(len(stack.pattern), EVERY) if stack.depth >= EVERY else stack.depth
        changes[side] = _placed(stack, side, kind, wanted, min(length, stack.depth), make)
    return replace(m, **changes)


def _placed(stack: Plain, side: str, kind: type[BranchSpec], wanted: Collection[int], length: int, make: Make) -> Plain:
    """The stack with `make` of the feed-forward in the wanted layers, written as a pattern of `length` blocks."""
    pattern = []
    for layer in range(length):
        block = stack.pattern[layer % len(stack.pattern)]
        if layer in wanted and not _has(block, kind):
            changed = swap(block, FeedForward, make)
            if changed is block:
                where = join(side, f"pattern[{layer % len(stack.pattern)}]")
                raise SpecError(where, f"layer {layer + 1} has no feed-forward to replace; choose a base that has one")
            block = changed
        pattern.append(block)
    placed = replace(stack, pattern=tuple(pattern))
    found = {call for call in range(stack.depth) if _has(placed.block_of(call), kind)}
    if stack.unique not in (None, stack.depth) and found != set(wanted):
        layers = ", ".join(str(layer + 1) for layer in sorted(wanted))
        raise SpecError(
            join(side, "unique"),
            f"{stack.unique} blocks serve {stack.depth} layers, so {kind.kind!r} cannot stand in layer {layers} alone; "
            "leave it out",
        )
    return placed


def _has(block: Block, kind: type[BranchSpec]) -> bool:
    return any(isinstance(part, kind) for part in walk(block))


VARIANTS = {
    "mixture_of_experts": Variant(
        mixture_of_experts,
        "experts",
        "two of 32 experts in every fourth feed-forward",
        "Shazeer et al. 2017",
        Row(48, 647_841_024, 648_233_472),
    ),
    "switch": Variant(
        switch,
        "experts",
        "one of 32 experts in every fourth feed-forward",
        "Fedus et al. 2022",
        Row(49, 1_100_825_856, 1_101_218_304),
    ),
    "product_key_memory": Variant(
        product_key_memory,
        "experts",
        "a memory of 512 x 512 keys instead of one feed-forward of the decoder",
        "Lample et al. 2019",
        Row(52, 420_303_488, 420_695_936),
    ),
}
