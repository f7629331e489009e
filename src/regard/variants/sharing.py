"""Rows 22, 25, 26 and 29 to 31 of Narang et al. 2021: blocks shared by all layers, and shared vocabulary tables."""

from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.init import FanIn, T5Init
from regard.nn.stacks.plain import Plain
from regard.variants.base import Edit, Variant, own_softmax, unscaled


def shared(*sides: str) -> Edit:
    """Return a function that makes all layers of each stack in `sides` share one block (Lan et al. 2020).

    The softmax matrix is untied, as in Narang et al. 2021.
    """

    def edit(m: Any) -> Any:
        changes: dict[str, Any] = {}
        for side in sides:
            stack = getattr(m, side, None)
            if stack is None:
                continue
            if not isinstance(stack, Plain):
                raise SpecError("variants", f"the {side} must be a plain stack to share its layers, not {stack.kind!r}")
            if len(stack.pattern) > 1:
                raise SpecError("variants", f"the layers of the {side} differ, so they cannot share one block")
            changes[side] = replace(stack, unique=1)
        return own_softmax(replace(m, **changes)) if changes else m

    return edit


def sharing(source_target: bool, input_output: bool) -> Edit:
    """Return a function that ties or unties source and target embeddings, and target embeddings and softmax matrix."""

    def edit(m: Any) -> Any:
        if not isinstance(m, EncoderDecoder):
            raise SpecError("", "only an encoder-decoder has source and target tables to share")
        m = replace(m, sharing=replace(m.sharing, source_target=source_target, input_output=input_output))
        return _rescaled(m) if input_output else unscaled(m)

    return edit


def _rescaled(m: Any) -> Any:
    """Add T5's factor d_model^-1/2 before the softmax, because T5 initialises a tied matrix with unit variance."""
    if not isinstance(m.init, T5Init | FanIn) or not hasattr(m.head, "scaled"):
        return m
    return replace(m, head=replace(m.head, scaled=True))


LAN = "Lan et al. 2020"
PRESS = "Press and Wolf 2017"

VARIANTS = {
    "block_sharing": Variant(shared("encoder", "decoder"), "sharing", "one block for all layers of a stack", LAN),
    "block_sharing_encoder": Variant(shared("encoder"), "sharing", "one block for all layers of the encoder", LAN),
    "block_sharing_decoder": Variant(shared("decoder"), "sharing", "one block for all layers of the decoder", LAN),
    "tied_inputs": Variant(
        sharing(True, False), "vocabulary", "encoder and decoder inputs share a table, the softmax has its own", PRESS
    ),
    "tied_decoder": Variant(
        sharing(False, True), "vocabulary", "decoder input and softmax share a table, the encoder has its own", PRESS
    ),
    "untied": Variant(sharing(False, False), "vocabulary", "separate tables for encoder, decoder and softmax", PRESS),
}
