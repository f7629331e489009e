"""Path lengths: the number of dependent operations between the first source token and the last output.

An operation is one layer applied to all tokens at once, or one step of one recurrent layer. For n source and n target
tokens, the *longest* path is the number of operations that must run one after another on any hardware. The *shortest*
path is the smallest number of operations that a signal passes through from the first source token to the last output
(Vaswani et al. 2017, table 1). The encoder has E layers, and the decoder has D layers.

    Transformer, ConvS2S, E + D layers     longest  E + D                        shortest  E + 1
    ByteNet, E + D blocks                           E + D                                  E + D
    RNN, unidirectional encoder, E + D layers       (1 + max(E, D)) n                      2n + E - 1
    RNN, reversed or bidirectional encoder          (1 + max(E, D)) n                      n + E
    RNN with attention                              one more than without                  E + 1

The longest path may start at any source token. A recurrent layer is applied to all tokens before the layer above it, as
bidirectional layers require. (Unidirectional layers could also run in parallel, each one token behind the layer below.
This takes 2n + max(E, D) - 1 operations.) The initial state of a decoder layer is the last state of the encoder layer
at the same height, counted from the top. If the encoder runs in reverse, that state comes directly from the first
source token. Attention is one more operation, whose output depends on the encoder alone. In a ByteNet, the last of n
outputs depends on the first token only if the receptive field is at least n tokens.
"""

from dataclasses import dataclass

from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.models.baselines.bytenet import ByteNet
from regard.models.baselines.convs2s import ConvS2S
from regard.models.baselines.rnn import EncoderState, Recurrent
from regard.models.encoder_decoder import EncoderDecoder


@dataclass(frozen=True, slots=True)
class Length:
    """A number of operations that depends on the number of tokens n: `each` * n + `fixed`."""

    each: int
    fixed: int

    def at(self, n: int) -> int:
        """Return the number of operations for n source and n target tokens."""
        return self.each * n + self.fixed

    def __str__(self) -> str:
        if not self.each:
            return str(self.fixed)
        each = "n" if self.each == 1 else f"{self.each}n"
        return each + (f" + {self.fixed}" if self.fixed > 0 else f" - {-self.fixed}" if self.fixed else "")


def path_lengths(model: ModelSpec) -> tuple[Length, Length]:
    """Return the lengths of the longest and of the shortest path in a sequence-to-sequence model."""
    if isinstance(model, EncoderDecoder | ConvS2S):
        encoder, decoder = (
            (model.encoder.blocks(), model.decoder.blocks())
            if isinstance(model, EncoderDecoder)
            else (len(model.encoder), len(model.decoder))
        )
        # The last decoder layer attends to the output of the whole encoder.
        return Length(0, encoder + decoder), Length(0, encoder + 1)
    if isinstance(model, ByteNet):
        # The decoder is stacked on the encoder, so every path passes through all blocks.
        depth = Length(0, model.encoder_blocks + model.decoder_blocks)
        return depth, depth
    if isinstance(model, Recurrent):
        return _recurrent(model)
    raise SpecError("kind", f"the path length of {model.kind!r} is not known")


def _recurrent(model: Recurrent) -> tuple[Length, Length]:
    encoder, decoder = model.encoder, model.decoder
    E, D = encoder.depth, decoder.depth
    odd = decoder.input_feeding != "none" or decoder.query != "top" or decoder.self_attention is not None
    if odd or encoder.direction == "first_both" or not isinstance(decoder.initial_state, EncoderState):
        raise SpecError(
            "decoder",
            "path lengths are known only for decoders that start from the encoder's states, without input feeding",
        )
    # The longest path crosses all layers of encoder or decoder, and one layer of the other.
    longest = Length(1 + max(E, D), 0)
    shortest = Length(2, E - 1) if encoder.direction == "forwards" else Length(1, E)
    if decoder.attention is not None:
        longest, shortest = Length(longest.each, longest.fixed + 1), Length(0, E + 1)
    return longest, shortest
