"""Rows 37 to 39 of Narang et al. 2021: convolutions that replace self-attention or are combined with it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.convolution import DynamicConv, LightConv, SharedDynamicConv, SharedLightConv
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.evolved import EvolvedDecoderConv, EvolvedEncoderConv, GatedLinear
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.parallel import Parallel
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.position.base import AtHeads
from regard.nn.stacks.base import StackSpec
from regard.nn.stacks.plain import Plain
from regard.tree import hints, swap, walk
from regard.variants.base import Edit, Variant

WIDTHS = (3, 7, 15, 31)  # Wu et al. 2019: kernel sizes of the first four layers; all further layers use the last one


def attends(part: Any) -> bool:
    """Return True if a part of a model spec contains self-attention."""
    return any(isinstance(inner, SelfAttention) for inner in walk(part))


def light_conv(m: Any) -> Any:
    """Replace every self-attention layer by a lightweight convolution, and remove the position schemes of attention."""
    return swap(swap(m, StackSpec, _without_positions), SelfAttention, lambda _: LightConv())


def dynamic_conv(m: Any) -> Any:
    """Replace self-attention by dynamic convolutions.

    The hidden width of feed-forward layers is divided by six (3072 becomes 512), to compensate for the additional
    parameters of the convolutions.
    """
    if not attends(m):
        return m
    m = swap(swap(m, StackSpec, _without_positions), SelfAttention, lambda _: DynamicConv())
    return swap(m, FeedForward, lambda f: replace(f, d_hidden=max(1, (f.d_hidden or 4 * m.d_model) // 6)))


def _without_positions(stack: Any) -> Any:
    if not attends(stack) or "position" not in hints(type(stack)):
        return stack
    return replace(stack, position=None, positions=())


def widening(make: Callable[[int], BranchSpec]) -> Edit:
    """Return a function that replaces self-attention by convolutions with kernel sizes that grow with the layer number.

    `make(size)` returns a convolution with a kernel of `size` tokens (Wu et al. 2019).
    """

    def layer(block: Block, width: int) -> Block:
        return swap(block, SelfAttention, lambda _: make(width))

    def widened(stack: StackSpec) -> StackSpec:
        if not attends(stack):
            return stack
        if not isinstance(stack, Plain):
            raise SpecError(
                "kind", f"{stack.kind!r} has no separate layers for different kernel sizes; use a plain stack"
            )
        blocks = range(stack.unique or stack.depth)
        pattern = tuple(layer(stack.block_of(n), WIDTHS[min(n, len(WIDTHS) - 1)]) for n in blocks)
        return replace(stack, pattern=pattern, position=None, positions=())

    return lambda m: swap(m, StackSpec, widened)


def evolved(m: Any) -> Any:
    """Use the Evolved Transformer (So et al. 2019) as in Narang et al. 2021: one evolved block for every two layers.

    The self-attention that runs in parallel with cross-attention has twice as many heads, each as wide as before. A
    position scheme with parameters per head gets a second set of parameters for these heads. The decoder uses Swish
    as its activation function; the encoder keeps the base's activation function.
    """

    def doubled(attention: SelfAttention) -> SelfAttention:
        d_head = attention.d_head or m.d_head or m.d_model // m.heads
        return replace(attention, heads=2 * (attention.heads or m.heads), d_head=d_head)

    def shorter(depth: int, _: str) -> int:
        if depth % 2:
            raise SpecError("variants", f"an evolved block replaces two layers, so the depth must be even, not {depth}")
        return depth // 2

    return _evolved(m, doubled, shorter, bias=False)


def evolved_so(m: Any) -> Any:
    """Use the Evolved Transformer as in So et al. 2019: 3 encoder blocks and 4 decoder blocks instead of 6 layers each.

    The self-attention that runs in parallel with cross-attention has twice as many heads (at most 16), with the same
    total width.
    """

    def doubled(attention: SelfAttention) -> SelfAttention:
        heads = attention.heads or m.heads
        more = max(heads, min(2 * heads, 16))
        return attention if more == heads else replace(attention, heads=more, d_head=None, d_value=None)

    def shorter(depth: int, side: str) -> int:
        return -(-depth // 2) if side == "encoder" else -(-2 * depth // 3)

    return _evolved(m, doubled, shorter, bias=True)


def _evolved(
    m: Any, doubled: Callable[[SelfAttention], SelfAttention], shorter: Callable[[int, str], int], bias: bool
) -> Any:
    if any(isinstance(part, EvolvedEncoderConv | EvolvedDecoderConv) for part in walk(m)):
        return m
    changes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        stack = getattr(m, side, None)
        if stack is None:
            continue
        if not isinstance(stack, Plain) or len(stack.pattern) != 1:
            raise SpecError("variants", f"evolved blocks need a plain stack of equal blocks, which the {side} is not")
        block, depth = stack.pattern[0], shorter(stack.depth, side)
        attention, cross, feedforward = _ancestors(block, side)
        norm = _norm(block)
        if side == "encoder":
            branches = (GatedLinear(bias=True), EvolvedEncoderConv(norm, bias), attention, feedforward)
        else:
            wide, stack = _with_position(doubled(attention), stack)
            swish = replace(feedforward, activation="swish")
            if cross is None:
                branches = (wide, EvolvedDecoderConv(norm), attention, swish)
            else:
                branches = (Parallel((wide, cross)), EvolvedDecoderConv(norm), attention, cross, swish)
        unique = None if stack.unique is None else min(stack.unique, depth)
        evolved = Block(branches, block.rules()[0])
        changes[side] = replace(stack, pattern=(evolved,), depth=depth, unique=unique)
    return replace(m, **changes)


def _ancestors(block: Block, side: str) -> tuple[SelfAttention, CrossAttention | None, FeedForward]:
    """Return self-attention, cross-attention (or None) and feed-forward layer of a block, for an evolved block."""
    if len(set(block.rules())) > 1:
        raise SpecError("variants", f"the branches of the {side} have different residual rules; use one rule for all")
    match block.branches:
        case (SelfAttention() as attention, FeedForward() as feedforward):
            return attention, None, feedforward
        case (SelfAttention() as attention, CrossAttention() as cross, FeedForward() as feedforward):
            return attention, cross, feedforward
    kinds = ", ".join(branch.kind for branch in block.branches)
    raise SpecError("variants", f"evolved blocks need attention and feed-forward layers; the {side} has {kinds}")


def _norm(block: Block) -> Norm:
    """Return the norm of the block's sublayers, or LayerNorm if there is none, because convolutions need a norm."""
    norm = getattr(block.rules()[0], "norm", None)
    return norm if isinstance(norm, Norm) and not isinstance(norm, NoNorm) else LayerNorm(eps=1e-6)


def _with_position(wide: SelfAttention, stack: Plain) -> tuple[SelfAttention, Plain]:
    """Adapt the position scheme to `wide`, self-attention with more heads. Return the attention and the stack.

    Either the stack gets a second position scheme for these heads, or the attention layer gets its own scheme.
    """
    position = stack.position
    if position is None or wide.position is not None or wide.heads is None:
        return wide, stack
    if position.shaped_by == ("heads",):
        return wide, replace(stack, positions=(*stack.positions, AtHeads(wide.heads, position)))
    fits = "heads" not in position.shaped_by and wide.d_head is not None
    return (wide if fits else replace(wide, position=position)), stack


WU = "Wu et al. 2019"
SO = "So et al. 2019"

VARIANTS = {
    "dynamic_conv": Variant(
        dynamic_conv,
        "convolution",
        "dynamic convolution of width 9 instead of self-attention, per channel; 1/6 of the hidden width",
        WU,
    ),
    "light_conv": Variant(
        light_conv, "convolution", "lightweight convolution of width 9 instead of self-attention, per channel", WU
    ),
    "dynamic_conv_wu": Variant(
        widening(SharedDynamicConv),
        "convolution",
        "dynamic convolution of widths 3 to 31 instead of self-attention, per head",
        WU,
    ),
    "light_conv_wu": Variant(
        widening(SharedLightConv),
        "convolution",
        "lightweight convolution of widths 3 to 31 instead of self-attention, per head",
        WU,
    ),
    "evolved": Variant(
        evolved, "convolution", "evolved blocks of gates, convolutions and attention, one for every two layers", SO
    ),
    "evolved_so": Variant(
        evolved_so, "convolution", "evolved blocks, 3 and 4 for 6 layers; twice the heads of the same total width", SO
    ),
}
