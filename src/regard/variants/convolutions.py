"""Rows 37 to 39: convolutions instead of self-attention, or beside it."""

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
from regard.variants.base import Edit, Row, Variant

WIDTHS = (3, 7, 15, 31)  # Wu et al. 2019, from the first layer on; all further layers have the last


def attends(part: Any) -> bool:
    """Whether there is self-attention to be replaced."""
    return any(isinstance(inner, SelfAttention) for inner in walk(part))


def light_conv(m: Any) -> Any:
    """A convolution for every self-attention; positions in attention have nothing left to speak to."""
    return swap(swap(m, StackSpec, _without_positions), SelfAttention, lambda _: LightConv())


def dynamic_conv(m: Any) -> Any:
    """The same with predicted filters, which cost so much that feed-forwards shrink to a sixth: 3072 to 512."""
    if not attends(m):
        return m
    m = swap(swap(m, StackSpec, _without_positions), SelfAttention, lambda _: DynamicConv())
    return swap(m, FeedForward, lambda f: replace(f, d_hidden=max(1, (f.d_hidden or 4 * m.d_model) // 6)))


def _without_positions(stack: Any) -> Any:
    if not attends(stack) or "position" not in hints(type(stack)):
        return stack
    return replace(stack, position=None, positions=())


def widening(make: Callable[[int], BranchSpec]) -> Edit:
    """Wu et al. 2019: convolutions for all self-attentions, narrow in the first layers and wide in the last."""

    def layer(block: Block, width: int) -> Block:
        return swap(block, SelfAttention, lambda _: make(width))

    def widened(stack: StackSpec) -> StackSpec:
        if not attends(stack):
            return stack
        if not isinstance(stack, Plain):
            raise SpecError("kind", f"{stack.kind!r} has no layers that could widen one by one; use a plain stack")
        blocks = range(stack.unique or stack.depth)
        pattern = tuple(layer(stack.block_of(n), WIDTHS[min(n, len(WIDTHS) - 1)]) for n in blocks)
        return replace(stack, pattern=pattern, position=None, positions=())

    return lambda m: swap(m, StackSpec, widened)


def evolved(m: Any) -> Any:
    """So et al. 2019 as Narang et al. 2021 ran it: an evolved block for two layers, twice the heads of the same width.

    The heads of the attention beside cross-attention are doubled; a position that counts heads has a second table for
    them. Activations in the encoder stay the base's, those of the decoder are Swish.
    """

    def doubled(attention: SelfAttention) -> SelfAttention:
        d_head = attention.d_head or m.d_head or m.d_model // m.heads
        return replace(attention, heads=2 * (attention.heads or m.heads), d_head=d_head)

    def shorter(depth: int, _: str) -> int:
        if depth % 2:
            raise SpecError("variants", f"an evolved block stands for two layers; choose an even depth, not {depth}")
        return depth // 2

    return _evolved(m, doubled, shorter, bias=False)


def evolved_so(m: Any) -> Any:
    """So et al. 2019: 3 and 4 evolved blocks for 6 layers, twice the heads (16 at most) of together the same width."""

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
            raise SpecError("variants", f"blocks evolve in a plain stack of equal blocks, which the {side} is not")
        block, depth = stack.pattern[0], shorter(stack.depth, side)
        attention, cross, feedforward = _ancestors(block, side)
        norm = _norm(block)
        if side == "encoder":
            branches = (GatedLinear(bias=True), EvolvedEncoderConv(norm, bias), attention, feedforward)
        else:
            many, stack = _with_position(doubled(attention), stack)
            swish = replace(feedforward, activation="swish")
            if cross is None:
                branches = (many, EvolvedDecoderConv(norm), attention, swish)
            else:
                branches = (Parallel((many, cross)), EvolvedDecoderConv(norm), attention, cross, swish)
        unique = None if stack.unique is None else min(stack.unique, depth)
        evolved = Block(branches, block.rules()[0])
        changes[side] = replace(stack, pattern=(evolved,), depth=depth, unique=unique)
    return replace(m, **changes)


def _ancestors(block: Block, side: str) -> tuple[SelfAttention, CrossAttention | None, FeedForward]:
    """What a block evolves from."""
    if len(set(block.rules())) > 1:
        raise SpecError("variants", f"the branches of the {side} join the stream in different ways; choose one for all")
    match block.branches:
        case (SelfAttention() as attention, FeedForward() as feedforward):
            return attention, None, feedforward
        case (SelfAttention() as attention, CrossAttention() as cross, FeedForward() as feedforward):
            return attention, cross, feedforward
    found = ", ".join(branch.kind for branch in block.branches)
    raise SpecError("variants", f"blocks evolve from attention and feed-forward; the {side} has {found}")


def _norm(block: Block) -> Norm:
    """The norm of the block, also for inside its convolutions, which need one even where the stream has none."""
    norm = getattr(block.rules()[0], "norm", None)
    return norm if isinstance(norm, Norm) and not isinstance(norm, NoNorm) else LayerNorm(eps=1e-6)


def _with_position(many: SelfAttention, stack: Plain) -> tuple[SelfAttention, Plain]:
    """The stack's position also for an attention with more heads: a second table, or where that fits not, its own."""
    position = stack.position
    if position is None or many.position is not None or many.heads is None:
        return many, stack
    if position.shaped_by == ("heads",):
        return many, replace(stack, positions=(*stack.positions, AtHeads(many.heads, position)))
    fits = "heads" not in position.shaped_by and many.d_head is not None
    return (many if fits else replace(many, position=position)), stack


WU = "Wu et al. 2019"
SO = "So et al. 2019"

VARIANTS = {
    "dynamic_conv": Variant(
        dynamic_conv,
        "convolution",
        "9 taps with predicted filters instead of self-attention, a filter per channel; feed-forwards of a sixth",
        WU,
        Row(37, 256_269_312, 256_662_528),
    ),
    "light_conv": Variant(
        light_conv,
        "convolution",
        "9 taps with learned filters instead of self-attention, a filter per channel",
        WU,
        Row(38, 223_300_608, 223_693_824),
    ),
    "dynamic_conv_wu": Variant(
        widening(SharedDynamicConv),
        "convolution",
        "3 to 31 taps with predicted filters instead of self-attention, a filter per head",
        WU,
    ),
    "light_conv_wu": Variant(
        widening(SharedLightConv),
        "convolution",
        "3 to 31 taps with learned filters instead of self-attention, a filter per head",
        WU,
    ),
    "evolved": Variant(
        evolved,
        "convolution",
        "evolved blocks of gates, convolutions and attention, one for two layers",
        SO,
        Row(39, 216_344_064, 216_735_744),
    ),
    "evolved_so": Variant(
        evolved_so,
        "convolution",
        "evolved blocks, 3 and 4 for 6 layers; doubled heads keep the width of all of them",
        SO,
    ),
}
