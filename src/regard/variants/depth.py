"""Rows 18 to 21 of Narang et al. 2021: deeper and narrower, or shallower and wider models of about equal size."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

from regard.errors import SpecError
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.feedforward import FeedForward
from regard.nn.stacks.base import StackSpec
from regard.nn.stacks.plain import Plain
from regard.tree import swap, walk
from regard.variants.base import Edit, Variant


def deeper(factor: Fraction) -> Edit:
    """Return a function that multiplies the number of layers by `factor`.

    The number of heads and the hidden width are divided by `factor`. The width of a head does not change.
    """

    def times(value: int, by: Fraction, what: str) -> int:
        product = value * by
        if product.denominator != 1 or product < 1:
            raise SpecError("", f"{by} of {value} {what} is not a whole number; choose a base whose sizes divide")
        return int(product)

    def edit(m: Any) -> Any:
        other = next((part for part in walk(m) if isinstance(part, StackSpec) and not isinstance(part, Plain)), None)
        if other is not None:
            raise SpecError("variants", f"only a plain stack can have layers added or removed, not {other.kind!r}")
        if any(isinstance(part, Plain) and len(part.pattern) > 1 for part in walk(m)):
            raise SpecError(
                "variants", "the layers differ from each other, so none can be added or removed; use equal layers"
            )
        if any(isinstance(part, BranchSpec) and getattr(part, "heads", None) is not None for part in walk(m)):
            raise SpecError("variants", "a layer has its own number of heads, which would not change; leave it out")
        d_head = m.d_head or m.d_model // m.heads
        hidden = 4 * m.d_model
        m = swap(m, FeedForward, lambda f: replace(f, d_hidden=times(f.d_hidden or hidden, 1 / factor, "hidden units")))
        m = swap(m, Plain, lambda s: replace(s, depth=times(s.depth, factor, "layers")))
        return replace(m, heads=times(m.heads, 1 / factor, "heads"), d_head=d_head)

    return edit


NARANG = "Narang et al. 2021"

VARIANTS = {
    "layers_24": Variant(deeper(Fraction(2)), "depth", "twice the layers, half the heads and hidden width", NARANG),
    "layers_18": Variant(
        deeper(Fraction(3, 2)), "depth", "3/2 of the layers, 2/3 of the heads and hidden width", NARANG
    ),
    "layers_8": Variant(
        deeper(Fraction(2, 3)), "depth", "2/3 of the layers, 3/2 of the heads and hidden width", NARANG
    ),
    "layers_6": Variant(deeper(Fraction(1, 2)), "depth", "half the layers, twice the heads and hidden width", NARANG),
}
