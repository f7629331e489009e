"""Position schemes that are not in the table of Narang et al. 2021."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Sinusoidal, Tokens
from regard.nn.position.additive import Learned
from regard.nn.position.base import Position
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.stacks.base import StackSpec
from regard.tree import hints, swap, walk
from regard.variants.base import Edit, Variant


def at_input(position: Any) -> Edit:
    """Return a function that adds position vectors to the embeddings and removes position schemes from attention."""

    def edit(m: Any) -> Any:
        cleared = swap(swap(m, SelfAttention, _remove_position), StackSpec, _without_position)
        return swap(cleared, Tokens, lambda t: replace(t, position=position))

    return edit


def in_attention(make: Callable[[], Position]) -> Edit:
    """Return a function that uses a position scheme in self-attention and removes position vectors at the input.

    All layers of a stack share the position scheme.
    """

    def with_position(stack: Any) -> Any:
        if not any(isinstance(part, BranchSpec) and part.attends for part in walk(stack)):
            raise SpecError("", "has no attention that could use these positions")
        return replace(_without_position(stack), position=make())

    def edit(m: Any) -> Any:
        cleared = swap(swap(m, SelfAttention, _remove_position), Tokens, lambda t: replace(t, position=None))
        return swap(cleared, StackSpec, with_position)

    return edit


def _remove_position(attention: SelfAttention) -> SelfAttention:
    return replace(attention, position=None)


def _without_position(stack: Any) -> Any:
    if "position" not in hints(type(stack)):
        raise SpecError("", f"a stack of kind {stack.kind!r} has no positions")
    return replace(stack, position=None, positions=())


VARIANTS = {
    "alibi": Variant(in_attention(ALiBi), "position", "a penalty that grows with distance", "Press et al. 2022"),
    "learned": Variant(
        at_input(Learned(512)), "position", "learned absolute positions, up to 512", "Gehring et al. 2017"
    ),
    "no_positions": Variant(
        at_input(None), "position", "no positions; a decoder can infer order from its causal mask", "Haviv et al. 2022"
    ),
    "rotary": Variant(in_attention(Rotary), "position", "queries and keys rotated by their position", "Su et al. 2021"),
    "shaw": Variant(in_attention(Shaw), "position", "relative positions in keys and values", "Shaw et al. 2018"),
    "sinusoidal": Variant(at_input(Sinusoidal()), "position", "sines and cosines at the input", "Vaswani et al. 2017"),
    "t5_bias": Variant(
        in_attention(T5Bias), "position", "a bias per head and bucket of distances", "Raffel et al. 2020"
    ),
}
