"""Models of equal size: the width at which a model has a given number of parameters."""

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

CLOSE = 0.01  # relative error to aim for
NEAR = 0.05  # largest relative error allowed
WIDEST = 2**14
EVEN = 2  # bidirectional layers, gates and rotary pairs halve a width


def nearest_width(size: Callable[[int], int], target: int, step: int = 1, widest: int = WIDEST) -> int:
    """Return the multiple of `step` whose `size` is closest to `target`. The size must increase with the width."""
    low, high = 1, 2  # in units of `step`: size(low) <= target < size(high), unless size(1) > target
    while high * step < widest and size(high * step) <= target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle * step) <= target else (low, middle)
    return min((low * step, high * step), key=lambda width: abs(size(width) - target))


def resized(model: ModelSpec, target: int) -> tuple[ModelSpec, float]:
    """Return the model resized to about `target` parameters, and the factor by which d_model was multiplied.

    A model that is already within 1 % is returned unchanged. Otherwise d_model and all explicit widths are scaled
    together, and hidden widths are adjusted to reduce the remaining difference. If the remaining difference is more
    than 5 %, an error is raised.
    """

    def error(spec: ModelSpec) -> float:
        return abs(count(spec) / target - 1)

    if error(model) <= CLOSE:
        return model, 1.0
    before: int = model.d_model
    width = nearest_width(lambda width: count(widened(model, width)), target, EVEN)
    result = widened(model, width)
    if error(result) > CLOSE and getattr(result, "d_head", 1) is not None:
        # Because d_head is rounded to even numbers, the size jumps from width to width. Solve again with d_head fixed.
        narrow = result
        width = nearest_width(lambda width: count(widened(narrow, width)), target, EVEN)
        result = widened(narrow, width)
    if error(result) > CLOSE and _any_feed_forward(result):
        least, size = count(scaled(result, 0.0, 1)), count(result)
        if size > least and target > least:
            result = scaled(result, (target - least) / (size - least), 1)
    if error(result) > NEAR:
        raise SpecError(
            "d_model", f"no width gives {target:,} parameters within {NEAR:.0%}; the nearest has {count(result):,}"
        )
    return result, width / before


def widened(model: Any, width: int) -> Any:
    """Return the model with d_model set to `width` and explicit widths scaled in proportion.

    If `width` / heads is not an even number, d_head is set to the nearest even number.
    """
    factor = width / model.d_model

    def share(size: int) -> int:
        return max(1, round(size * factor))

    if isinstance(model, ConvS2S):

        def layers(before: Layers) -> Layers:
            return tuple((share(size), kernel) for size, kernel in before)

        out = None if model.d_out is None else share(model.d_out)
        return replace(model, d_model=width, d_out=out, encoder=layers(model.encoder), decoder=layers(model.decoder))
    if isinstance(model, Recurrent) and model.encoder.d_hidden is not None:
        model = replace(model, encoder=replace(model.encoder, d_hidden=share(model.encoder.d_hidden)))
    result = scaled(model, factor, 1) if _any_feed_forward(model, explicit=True) else model
    heads = {}
    if getattr(model, "d_head", 1) is None and width % (EVEN * model.heads):
        heads = {"d_head": EVEN * max(1, round(width / model.heads / EVEN))}
    return replace(result, d_model=width, **heads)


def _any_feed_forward(model: Any, explicit: bool = False) -> bool:
    return any(isinstance(part, FeedForward) and (part.d_hidden or not explicit) for part in walk(model))
