"""Special tokens and length limits of a search, and the hypotheses that it returns."""

from dataclasses import dataclass

from regard.decoding.length_limit import LengthLimit
from regard.errors import SpecError
from regard.tree import Spec


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids that are not text: beginning, end and padding of a row."""

    bos: int
    eos: int
    pad: int

    def __post_init__(self) -> None:
        """Refuse negative ids."""
        for name in ("bos", "eos", "pad"):
            if getattr(self, name) < 0:
                raise SpecError(name, f"must not be negative, not {getattr(self, name)}")

    @property
    def never(self) -> tuple[int, ...]:
        """The ids that are never generated: bos and padding, unless one of them is also eos."""
        return tuple(sorted({self.bos, self.pad} - {self.eos}))


@dataclass(frozen=True, slots=True)
class Limits(Spec):
    """The length of an output in tokens, without eos.

    Without `max_len` the limit is `derived` from the length S of a row's own source; where the training text is not
    known (None), it is 2 S + 20. A forced prefix counts.
    """

    kind = "limits"
    min_len: int = 0
    max_len: int | None = None
    derived: LengthLimit | None = None

    def check(self) -> None:
        if self.min_len < 0:
            raise SpecError("min_len", f"must not be negative, not {self.min_len}")
        if self.max_len is not None and self.max_len < max(self.min_len, 1):
            raise SpecError("max_len", f"must be at least 1 and min_len ({self.min_len}), not {self.max_len}")

    def most(self, source: int | None, needed: int = 0) -> int:
        """Return the greatest length for a source of this length; a derived limit is at least `needed`."""
        if self.max_len is not None:
            return self.max_len
        if source is None:
            raise SpecError("max_len", "a model without a source has no length to derive it from; give a number")
        derived = 2 * source + 20 if self.derived is None else self.derived.most(source)
        return max(derived, self.min_len, needed)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An output of a model. Log-probabilities are the model's own, whatever constraints limited the choice."""

    ids: tuple[int, ...]  # without bos and eos; a forced prefix is part of it, a prompt is not
    score: float  # by which hypotheses rank: the normalised log_prob, with penalties
    log_prob: float  # the sum of token_log_probs
    token_log_probs: tuple[float, ...]  # of every id, and of eos if it ended by itself
    ended: bool  # with eos, not cut at the length limit


@dataclass(frozen=True, slots=True)
class Piece:
    """The new tokens of one row of a stream."""

    row: int
    ids: tuple[int, ...]  # empty where the row only ended
    hypothesis: Hypothesis | None = None  # the whole output, once the row has ended
