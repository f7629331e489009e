"""Inputs and outputs of a search: special tokens, length limits, hypotheses, and pieces of a streamed output."""

from dataclasses import dataclass

from regard.decoding.length_limit import LengthLimit
from regard.errors import SpecError
from regard.nn.checks import check_not_negative
from regard.tree import Spec


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of the special tokens: beginning of sequence (bos), end of sequence (eos) and padding."""

    bos: int
    eos: int
    pad: int

    def __post_init__(self) -> None:
        """Raise SpecError for a negative id."""
        for name in ("bos", "eos", "pad"):
            check_not_negative(name, getattr(self, name))

    @property
    def never(self) -> tuple[int, ...]:
        """The ids that are never generated: bos and padding, unless one of them is also eos."""
        return tuple(sorted({self.bos, self.pad} - {self.eos}))


@dataclass(frozen=True, slots=True)
class Limits(Spec):
    """The minimum and maximum length of an output in tokens, including a forced prefix but not eos.

    If `max_len` is None, the maximum is computed from the source length S by `derived`, which is fitted to the training
    text. If both are None, the maximum is 2 * S + 20.
    """

    kind = "limits"
    min_len: int = 0
    max_len: int | None = None
    derived: LengthLimit | None = None

    def check(self) -> None:
        check_not_negative("min_len", self.min_len)
        if self.max_len is not None and self.max_len < max(self.min_len, 1):
            raise SpecError("max_len", f"must be at least 1 and min_len ({self.min_len}), not {self.max_len}")

    def most(self, source: int | None, needed: int = 0) -> int:
        """Return the maximum output length for a source of `source` tokens (or None, if the model has no source).

        A maximum that is computed from the source length is at least `needed`.
        """
        if self.max_len is not None:
            return self.max_len
        if source is None:
            raise SpecError(
                "max_len", "is derived from the length of the source, but this model has no source; give a number"
            )
        derived = 2 * source + 20 if self.derived is None else self.derived.most(source)
        return max(derived, self.min_len, needed)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An output of a search. The log-probabilities are those of the model, without constraints."""

    ids: tuple[int, ...]  # ids without bos and eos; a forced prefix is included, a prompt is not
    score: float  # the normalised log_prob with penalties, which ranks hypotheses
    log_prob: float  # the sum of token_log_probs
    token_log_probs: tuple[float, ...]  # log p of every id, and of eos if the output ended with eos
    ended: bool  # True: the output ended with eos; False: it was cut at the length limit


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens that one decoding step adds to a batch row, for streaming."""

    row: int
    ids: tuple[int, ...]  # (): the row ended without a new token
    hypothesis: Hypothesis | None = None  # the whole output; None: the row has not ended
