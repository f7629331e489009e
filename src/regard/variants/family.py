"""Decoder-only translation: the layers of an encoder-decoder, joined into one stack that reads source and target."""

from dataclasses import replace
from typing import Any, Literal

from regard.errors import SpecError
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.bridge import Last
from regard.nn.stacks.plain import Plain
from regard.tree import hints
from regard.variants.base import Edit, Variant


def joined(input_attention: Literal["causal", "full"]) -> Edit:
    """Return a function that joins encoder and decoder into one stack of encoder blocks, without cross-attention."""

    def edit(m: Any) -> Any:
        if isinstance(m, DecoderOnlyTranslator):
            return replace(m, input_attention=input_attention)
        if not isinstance(m, EncoderDecoder):
            raise SpecError("variants", f"only an encoder-decoder can be joined into one stack, not {m.kind!r}")
        if not isinstance(m.encoder, Plain) or not isinstance(m.decoder, Plain) or not isinstance(m.bridge, Last):
            raise SpecError(
                "variants",
                "only plain stacks can be joined; leave out variants that change how the layers are connected",
            )
        if m.target_vocab is not None or not m.sharing.source_target:
            raise SpecError(
                "variants", "a decoder-only model needs one vocabulary and one embedding table for source and target"
            )
        if _blocks(m.encoder) != _blocks(m.decoder):
            raise SpecError(
                "variants", "encoder and decoder must be equal except for cross-attention; make them equal first"
            )
        stack = replace(m.encoder, depth=m.encoder.depth + m.decoder.depth)
        common = {name: getattr(m, name) for name in hints(DecoderOnlyTranslator) if hasattr(m, name)}
        own = {"input_attention": input_attention, "tied": m.sharing.input_output, "decoder": stack}
        return DecoderOnlyTranslator(**{**common, **own})

    return edit


def _blocks(stack: Plain) -> tuple[Any, ...]:
    """Return the settings of a stack without its depth and its cross-attention layers, for a comparison of stacks."""
    blocks = []
    for block in stack.pattern:
        pairs = zip(block.branches, block.rules(), strict=True)
        blocks.append([(branch, rule) for branch, rule in pairs if not isinstance(branch, CrossAttention)])
    return blocks, stack.unique, stack.position, stack.positions, stack.attention_pattern, stack.strict


RAFFEL = "Raffel et al. 2020"

VARIANTS = {
    "decoder_only": Variant(
        joined("causal"), "family", "no encoder: source and target in one causal stack", "Brown et al. 2020"
    ),
    "prefix_lm": Variant(
        joined("full"), "family", "no encoder: one stack with bidirectional attention over the source", RAFFEL
    ),
}
