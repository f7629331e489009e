"""Rows 47 and 50 of Narang et al. 2021: the Universal Transformer and the Funnel Transformer."""

from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.nn.gated_residual import GatedRecurrent
from regard.nn.norm import LayerNorm
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.funnel import Funnel
from regard.nn.stacks.plain import Plain
from regard.nn.stacks.universal import Universal, UniversalACT
from regard.tree import swap
from regard.variants.base import Edit, Variant, own_softmax
from regard.variants.residuals import rejoined


def universal(kind: type[Universal] | type[UniversalACT]) -> Edit:
    """Return a function that shares one gated block among all layers of a stack and unties the softmax matrix.

    A stack of 12 layers becomes 28 applications of the block.
    """

    def edit(m: Any) -> Any:
        sides = [side for side in ("encoder", "decoder") if hasattr(m, side)]
        if all(isinstance(getattr(m, side), kind) for side in sides):
            return m
        m = rejoined(m, GatedRecurrent)
        return own_softmax(replace(m, **{side: _universal(side, getattr(m, side), kind) for side in sides}))

    return edit


def _universal(side: str, stack: Any, kind: type[Universal] | type[UniversalACT]) -> Universal | UniversalACT:
    if not isinstance(stack, Plain):
        raise SpecError(side, f"is {stack.kind!r}, but {kind.kind!r} needs a plain stack; start from one")
    block, *more = stack.pattern
    if more:
        raise SpecError(f"{side}.pattern", f"must have one block to repeat, not {len(stack.pattern)}")
    around = max(1, stack.depth // 6)
    same = {name: getattr(stack, name) for name in ("position", "positions", "attention_pattern", "strict")}
    return kind(block, around, 2 * stack.depth, around, **same)


def funnel(m: Any) -> Any:
    """Divide the encoder's layers into three groups, halve the sequence length between them, and use RMS norms."""
    stack = getattr(m, "encoder", None)
    if stack is None:
        raise SpecError("", "a funnel needs a model with an encoder")
    if isinstance(stack, Funnel):
        return m
    if not isinstance(stack, Plain) or stack.unique is not None:
        raise SpecError("encoder", "must be a plain stack without shared layers for a funnel; start from one")
    if stack.depth < 2:
        raise SpecError("encoder.depth", f"a funnel needs at least 2 layers, not {stack.depth}")
    groups = min(3, stack.depth)
    layers = tuple(stack.depth // groups + (group < stack.depth % groups) for group in range(groups))
    shorter = Funnel(stack.pattern, layers, stack.position, stack.positions, stack.attention_pattern)
    return replace(m, encoder=swap(shorter, LayerNorm, lambda norm: RMSNorm(norm.eps)))


DEHGHANI = "Dehghani et al. 2019"

VARIANTS = {
    "universal": Variant(
        universal(Universal), "wiring", "one gated block shared by more than twice the layers; untied softmax", DEHGHANI
    ),
    "universal_act": Variant(
        universal(UniversalACT),
        "wiring",
        "the Universal Transformer with adaptive computation time: a number of layers per token",
        DEHGHANI,
    ),
    "funnel": Variant(funnel, "wiring", "an encoder that halves the length of its sequence twice", "Dai et al. 2020"),
}
