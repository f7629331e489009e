"""Rows 47 and 50: how blocks are wired."""

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
from regard.variants.base import Edit, Row, Variant, own_softmax
from regard.variants.residuals import rejoined


def universal(kind: type[Universal] | type[UniversalACT]) -> Edit:
    """One gated block for all layers of a stack, 28 of them for 12; the softmax has a matrix of its own."""

    def edit(m: Any) -> Any:
        sides = [side for side in ("encoder", "decoder") if hasattr(m, side)]
        if all(isinstance(getattr(m, side), kind) for side in sides):
            return m
        m = rejoined(m, GatedRecurrent)
        return own_softmax(replace(m, **{side: _universal(side, getattr(m, side), kind) for side in sides}))

    return edit


def _universal(side: str, stack: Any, kind: type[Universal] | type[UniversalACT]) -> Universal | UniversalACT:
    if not isinstance(stack, Plain):
        raise SpecError(side, f"{stack.kind!r} cannot be made {kind.kind!r}; start from a plain stack")
    block, *more = stack.pattern
    if more:
        raise SpecError(f"{side}.pattern", f"only one block can be applied again and again, not {len(stack.pattern)}")
    around = max(1, stack.depth // 6)
    same = {name: getattr(stack, name) for name in ("position", "positions", "attention_pattern", "strict")}
    return kind(block, around, 2 * stack.depth, around, **same)


def funnel(m: Any) -> Any:
    """An encoder of three groups of layers, each on half as many vectors as the one before, with RMS norms."""
    stack = getattr(m, "encoder", None)
    if stack is None:
        raise SpecError("", "only an encoder-decoder or an encoder alone has what a funnel shortens")
    if isinstance(stack, Funnel):
        return m
    if not isinstance(stack, Plain) or stack.unique is not None:
        raise SpecError("encoder", "a funnel is made of a plain stack whose layers are not shared; start from one")
    if stack.depth < 2:
        raise SpecError("encoder.depth", f"a funnel needs at least 2 layers, not {stack.depth}")
    groups = min(3, stack.depth)
    layers = tuple(stack.depth // groups + (group < stack.depth % groups) for group in range(groups))
    made = Funnel(stack.pattern, layers, stack.position, stack.positions, stack.attention_pattern)
    return replace(m, encoder=swap(made, LayerNorm, lambda norm: RMSNorm(norm.eps)))


DEHGHANI = "Dehghani et al. 2019"

VARIANTS = {
    "universal": Variant(
        universal(Universal),
        "wiring",
        "one gated block for all layers, more than twice as many; an own softmax",
        DEHGHANI,
        Row(47, 83_633_664, 84_026_112),
    ),
    "universal_act": Variant(
        universal(UniversalACT),
        "wiring",
        "the same, and every token halts when it is done: adaptive computation time",
        DEHGHANI,
    ),
    "funnel": Variant(
        funnel,
        "wiring",
        "an encoder that twice halves the length of its sequence",
        "Dai et al. 2020",
        Row(50, 223_024_128, 223_416_576),
    ),
}
