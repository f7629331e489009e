"""The table of modifications: a variant is a function from description to description.

The rows of Narang et al. 2021 that need no part of their own stand here; each later part brings its rows with it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from regard.errors import SpecError, nearest
from regard.models.base import ModelSpec
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.activation import Activation
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.input import Tokens
from regard.nn.norm import LayerNorm, PartialRMSNorm, RMSNorm
from regard.nn.position.additive import Learned, Sinusoidal
from regard.nn.position.base import Position
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.residual import PostNorm, PreNorm, Sandwich
from regard.nn.stacks.plain import Plain
from regard.tree import diff, swap

Edit = Callable[[Any], Any]


@dataclass(frozen=True)
class Variant:
    """A modification: what it does, where it is from, and the function that makes it."""

    edit: Edit
    about: str


def apply(name: str, spec: ModelSpec) -> ModelSpec:
    """`spec` with a modification. One that would change nothing is refused: a run must be what it is called."""
    if name not in VARIANTS:
        raise SpecError("variants", f"unknown variant {name!r}; {nearest(name, VARIANTS)}")
    changed = VARIANTS[name].edit(spec)
    if not diff(spec, changed):
        raise SpecError("variants", f"{name!r} changes nothing here: the model has it already, or has no place for it")
    return changed


def activation(phi: Activation) -> Edit:
    """Another function inside every feed-forward layer."""
    return lambda m: swap(m, FeedForward, lambda f: replace(f, activation=phi, gated=False))


def gated(phi: Activation) -> Edit:
    """Shazeer 2020: a gate of the same cost, so the hidden width shrinks to two thirds."""

    def edit(m: Any) -> Any:
        def narrowed(f: FeedForward) -> FeedForward:
            return replace(f, activation=phi, gated=True, d_hidden=(f.d_hidden or 4 * m.d_model) * 2 // 3)

        return swap(m, FeedForward, lambda f: replace(f, activation=phi) if f.gated else narrowed(f))

    return edit


def at_input(position: Any) -> Edit:
    """Positions added to the embeddings, and none in attention."""

    def edit(m: Any) -> Any:
        cleared = swap(swap(m, SelfAttention, _own_position_gone), Plain, _without_position)
        return swap(cleared, Tokens, lambda t: replace(t, position=position))

    return edit


def in_attention(make: Callable[[], Position]) -> Edit:
    """Positions in self-attention, shared by the layers of a stack, and none at the input."""

    def edit(m: Any) -> Any:
        cleared = swap(swap(m, SelfAttention, _own_position_gone), Tokens, lambda t: replace(t, position=None))
        return swap(cleared, Plain, lambda s: replace(s, position=make()))

    return edit


def _own_position_gone(attention: SelfAttention) -> SelfAttention:
    return replace(attention, position=None)


def _without_position(stack: Plain) -> Plain:
    return replace(stack, position=None)


def shared(*sides: str) -> Edit:
    """Lan et al. 2020: one block for all layers of a stack; the softmax has a matrix of its own, as in Narang et al."""

    def edit(m: Any) -> Any:
        changes: dict[str, Any] = {}
        for side in sides:
            stack = getattr(m, side, None)
            if isinstance(stack, Plain):
                changes[side] = replace(stack, unique=1)
        return _own_softmax(replace(m, **changes)) if changes else m

    return edit


def _own_softmax(m: Any) -> Any:
    if isinstance(m, EncoderDecoder):
        return replace(m, sharing=replace(m.sharing, input_output=False))
    return replace(m, tied=False) if isinstance(m, DecoderOnly) else m


def sharing(source_target: bool, input_output: bool) -> Edit:
    """Which of the three vocabulary tables are one."""

    def edit(m: Any) -> Any:
        if not isinstance(m, EncoderDecoder):
            raise SpecError("", "only an encoder-decoder has tables to share between source and target")
        return replace(m, sharing=replace(m.sharing, source_target=source_target, input_output=input_output))

    return edit


VARIANTS: dict[str, Variant] = {
    "alibi": Variant(in_attention(ALiBi), "Press et al. 2022: a penalty that grows with distance"),
    "block_sharing": Variant(shared("encoder", "decoder"), "Lan et al. 2020: one block for all layers"),
    "block_sharing_decoder": Variant(shared("decoder"), "one block for all layers of the decoder"),
    "block_sharing_encoder": Variant(shared("encoder"), "one block for all layers of the encoder"),
    "elu": Variant(activation("elu"), "Clevert et al. 2016"),
    "geglu": Variant(gated("gelu_tanh"), "Shazeer 2020: GELU gate"),
    "gelu": Variant(activation("gelu_tanh"), "Hendrycks and Gimpel 2016, tanh form"),
    "glu": Variant(gated("sigmoid"), "Dauphin et al. 2017"),
    "learned": Variant(at_input(Learned(512)), "learned absolute positions, up to 512"),
    "liglu": Variant(gated("linear"), "Shazeer 2020: bilinear"),
    "partial_rms_norm": Variant(
        lambda m: swap(m, LayerNorm, lambda _: PartialRMSNorm(0.0675)),
        "Zhang and Sennrich 2019, as Narang et al. ran it",
    ),
    "post_norm": Variant(lambda m: swap(m, PreNorm, lambda r: PostNorm(r.norm)), "Vaswani et al. 2017"),
    "pre_norm": Variant(lambda m: swap(m, PostNorm, lambda r: PreNorm(r.norm)), "Xiong et al. 2020"),
    "reglu": Variant(gated("relu"), "Shazeer 2020: ReLU gate"),
    "rms_norm": Variant(lambda m: swap(m, LayerNorm, lambda _: RMSNorm()), "Zhang and Sennrich 2019"),
    "rotary": Variant(in_attention(Rotary), "Su et al. 2021"),
    "sandwich": Variant(
        lambda m: swap(m, PreNorm, lambda r: Sandwich(r.norm)), "Ding et al. 2021: a norm on either side"
    ),
    "selu": Variant(activation("selu"), "Klambauer et al. 2017"),
    "shaw": Variant(in_attention(Shaw), "Shaw et al. 2018: relative positions in the keys"),
    "sigmoid": Variant(activation("sigmoid"), "the logistic function"),
    "sinusoidal": Variant(at_input(Sinusoidal()), "Vaswani et al. 2017"),
    "softplus": Variant(activation("softplus"), "ln(1 + e^x)"),
    "swiglu": Variant(gated("swish"), "Shazeer 2020: Swish gate"),
    "swish": Variant(activation("swish"), "Ramachandran et al. 2017"),
    "t5_bias": Variant(in_attention(T5Bias), "Raffel et al. 2020: bucketed distances"),
    "tied_decoder": Variant(sharing(False, True), "decoder input and softmax share a table, the encoder has its own"),
    "tied_inputs": Variant(sharing(True, False), "encoder and decoder inputs share a table, the softmax has its own"),
    "untied": Variant(sharing(False, False), "three tables"),
}
