"""Path lengths: how many dependent operations lie between the first source token and the last output.

An operation is one layer that is applied to all tokens at once, or one step of one recurrent layer. With n source and n
target tokens the *longest* way is the number of operations that no hardware can do side by side; the *shortest* is
what a signal must go through (Vaswani et al. 2017, table 1, between the first token read and the last one said).

    Transformer, E + D layers      longest  E + D             shortest  E + 1
"""

from dataclasses import dataclass

from regard.errors import SpecError
from regard.models.base import ModelSpec
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
    raise SpecError("kind", f"the path length of {model.kind!r} is not known")
