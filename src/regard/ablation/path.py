"""Path lengths: how many dependent operations lie between the first source token and the last output.

An operation is one layer that is applied to all tokens at once, or one step of one recurrent layer. With n source and n
target tokens the *longest* way is the number of operations that no hardware can do side by side; the *shortest* is
what a signal must go through (Vaswani et al. 2017, table 1, between the first token read and the last one said).

    Transformer, ConvS2S, E + D layers     longest  E + D                        shortest  E + 1
    ByteNet, E + D blocks                           E + D                                  E + D
    RNN, E + D layers, read forwards                (1 + max(E, D)) n                      2n + E - 1
    RNN, read backwards or both ways                (1 + max(E, D)) n                      n + E
    RNN with attention                              one more                               E + 1

The longest is that of the whole computation as it is run, from whichever source token: a recurrent layer has read all
tokens before the one above it begins (what is read both ways must be; layers that read one way could also follow each
other one token behind, in 2n + max(E, D) - 1 operations). A layer of the decoder opens with the last state of the
encoder's layer at its height, counted from the top, and that of a source read backwards has just met the first token.
Attention (and with it what goes to the head) is one operation more; what it finds has come through the encoder alone.
A ByteNet says the last of n tokens with the first in sight only if its receptive fields reach that far.
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
    """`each` n + `fixed` operations, for n tokens."""

    each: int
    fixed: int

    def at(self, n: int) -> int:
        """For n tokens on either side."""
        return self.each * n + self.fixed

    def __str__(self) -> str:
        if not self.each:
            return str(self.fixed)
        each = "n" if self.each == 1 else f"{self.each}n"
        return each + (f" + {self.fixed}" if self.fixed > 0 else f" - {-self.fixed}" if self.fixed else "")


def path_lengths(model: ModelSpec) -> tuple[Length, Length]:
    """(longest, shortest) of a model that reads a source and says a target."""
    if isinstance(model, EncoderDecoder):
        # Every layer is one operation, whatever n is: a signal goes through all of the encoder, whose output the last
        # layer of the decoder looks at.
        depth = model.encoder.blocks()
        return Length(0, depth + model.decoder.blocks()), Length(0, depth + 1)
    if isinstance(model, ConvS2S):
        depth = len(model.encoder)
        return Length(0, depth + len(model.decoder)), Length(0, depth + 1)
    if isinstance(model, ByteNet):
        # The decoder stands on the encoder: there is no way around any of the blocks.
        whole = Length(0, model.encoder_blocks + model.decoder_blocks)
        return whole, whole
    if isinstance(model, Recurrent):
        return _recurrent(model)
    raise SpecError("kind", f"the path length of {model.kind!r} is not known")


def _recurrent(model: Recurrent) -> tuple[Length, Length]:
    encoder, decoder = model.encoder, model.decoder
    E, D = encoder.depth, decoder.depth
    odd = decoder.input_feeding != "none" or decoder.query != "top" or decoder.self_attention is not None
    if odd or encoder.direction == "first_both" or not isinstance(decoder.initial_state, EncoderState):
        raise SpecError(
            "decoder", "path lengths are known for decoders that open from the source and feed nothing back"
        )
    # Up to some height in the encoder, from there in the decoder: one of the two has all layers, the other one of them.
    longest = Length(1 + max(E, D), 0)
    shortest = Length(2, E - 1) if encoder.direction == "forwards" else Length(1, E)
    if decoder.attention is not None:
        longest, shortest = Length(longest.each, longest.fixed + 1), Length(0, E + 1)
    return longest, shortest
