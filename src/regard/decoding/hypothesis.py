"""What a search is told about its ids and lengths, and what it finds."""

from dataclasses import dataclass

from regard.decoding.length_limit import LengthLimit
from regard.errors import SpecError
from regard.tree import Spec


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids that are not text: where a row begins, where it ends, what fills it up."""

    bos: int
    eos: int
    pad: int

    def __post_init__(self) -> None:
        """Refuse ids that no vocabulary has."""
        for name in ("bos", "eos", "pad"):
            if getattr(self, name) < 0:
                raise SpecError(name, f"must not be negative, not {getattr(self, name)}")

    @property
    def never(self) -> tuple[int, ...]:
        """What no row ever says. A model whose beginning or padding is its end still has to say it."""
        return tuple(sorted({self.bos, self.pad} - {self.eos}))


@dataclass(frozen=True, slots=True)
class Limits(Spec):
    """How long an output may be, counted in tokens without eos.

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
        """The most tokens a row may say whose source has this length; a derived limit leaves room for `needed`."""
        if self.max_len is not None:
            return self.max_len
        if source is None:
            raise SpecError("max_len", "a model without a source does not know how much to say; give a number")
        derived = 2 * source + 20 if self.derived is None else self.derived.most(source)
        return max(derived, self.min_len, needed)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One thing a model may say. Log-probabilities are the model's own, whatever rules narrowed the choice."""

    ids: tuple[int, ...]  # without bos and eos; a forced prefix is part of it, a prompt is not
    score: float  # what ranks: the normalised log_prob, with penalties
    log_prob: float  # the sum of token_log_probs
    token_log_probs: tuple[float, ...]  # of every id, and of eos if it ended by itself
    ended: bool  # by eos, not because there was no room left


@dataclass(frozen=True, slots=True)
class Piece:
    """What one row has just said, for a stream."""

    row: int
    ids: tuple[int, ...]  # what is new; nothing where the row only came to its end
    hypothesis: Hypothesis | None = None  # all of it, once the row has come to its end
