"""Equal parameters: the width at which a model has the size of another."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regard.ablation.rows import scaled
from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.models.baselines.convs2s import ConvS2S, Layers
from regard.models.baselines.rnn import Recurrent
from regard.models.build import count
from regard.nn.branches.feedforward import FeedForward
from regard.tree import walk

CLOSE = 0.01  # as near as is tried for
NEAR = 0.05  # as near as is asked for
WIDEST = 2**14
EVEN = 2  # halves of a bidirectional layer, of a gate, of a pair that is turned


def nearest_width(size: Callable[[int], int], wanted: int, step: int = 1, widest: int = WIDEST) -> int:
    """The multiple of `step` at which `size`, which grows with the width, comes nearest to `wanted`; by bisection."""
    low, high = 1, 2  # in steps: size(low) <= wanted < size(high), unless the smallest is too large
    while high * step < widest and size(high * step) <= wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle * step) <= wanted else (low, middle)
    return min((low * step, high * step), key=lambda width: abs(size(width) - wanted))


def resized(model: ModelSpec, wanted: int) -> tuple[ModelSpec, float]:
    """A model with about `wanted` parameters, and the factor of its width (1: it had them already within 1 %).

    Its d_model is solved for, and widths that are said explicitly go with it; what is left is made up by the hidden
    width of feed-forward layers, if it has any. More than 5 % beside it is refused.
    """
    if abs(count(model) / wanted - 1) <= CLOSE:
        return model, 1.0
    before: int = model.d_model  # type: ignore[reportAttributeAccessIssue]  # every family has it
    width = nearest_width(lambda width: count(widened(model, width)), wanted, EVEN)
    found = widened(model, width)
    if abs(count(found) / wanted - 1) > CLOSE and getattr(found, "d_head", 1) is not None:
        # Heads of an even width come in leaps: with that of the nearest fixed, the rest is solved for again.
        width = nearest_width(lambda width: count(widened(found, width)), wanted, EVEN)
        found = widened(found, width)
    if abs(count(found) / wanted - 1) > CLOSE and any(isinstance(part, FeedForward) for part in walk(found)):
        least, size = count(scaled(found, 0.0, 1)), count(found)
        if size > least and wanted > least:
            found = scaled(found, (wanted - least) / (size - least), 1)
    if abs(count(found) / wanted - 1) > NEAR:
        raise SpecError(
            "d_model", f"no width gives {wanted:,} parameters within {NEAR:.0%}; the nearest has {count(found):,}"
        )
    return found, width / before


def widened(model: Any, width: int) -> Any:
    """A model of another d_model, widths that it says explicitly in proportion.

    Heads that do not divide it get the even width that is nearest to their share.
    """
    if isinstance(model, ConvS2S):
        return _convolutions(model, width)
    if isinstance(model, Recurrent) and model.encoder.d_hidden is not None:
        hidden = _share(model.encoder.d_hidden, width / model.d_model)
        model = replace(model, encoder=replace(model.encoder, d_hidden=hidden))
    found = scaled(model, width / model.d_model, 1) if _explicit(model) else model
    heads = {}
    if getattr(model, "d_head", 1) is None and width % (EVEN * model.heads):
        heads = {"d_head": EVEN * max(1, round(width / model.heads / EVEN))}
    return replace(found, d_model=width, **heads)


def _explicit(model: Any) -> bool:
    return any(isinstance(part, FeedForward) and part.d_hidden is not None for part in walk(model))


def _share(size: int, factor: float) -> int:
    return max(1, round(size * factor))


def _convolutions(model: ConvS2S, width: int) -> ConvS2S:
    factor = width / model.d_model

    def layers(given: Layers) -> Layers:
        return tuple((_share(size, factor), kernel) for size, kernel in given)

    out = None if model.d_out is None else _share(model.d_out, factor)
    return replace(model, d_model=width, d_out=out, encoder=layers(model.encoder), decoder=layers(model.decoder))
