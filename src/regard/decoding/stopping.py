"""Stopping rules of beam search: ours, and exactly those of CTranslate2 and Hugging Face transformers.

The libraries also differ in the treatment of the length limit and in the ranking, so a rule includes both:

- `eos_at_limit`: a hypothesis of the greatest length may still end with eos.
- `strict`: hypotheses cut at the limit rank behind all that ended, and scores within 1e-5 are equal. Otherwise the
  score alone ranks finished hypotheses, to the last bit.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from regard.decoding.hypothesis import Hypothesis
from regard.decoding.rank import bucket, order

Normalise = Literal["none", "mean", "gnmt"]


@dataclass(frozen=True, slots=True)
class Scoring:
    """The score of a hypothesis: its log-probability over a power of its length, in which eos counts."""

    normalise: Normalise
    alpha: float  # 0 where nothing is normalised

    def score(self, log_prob: float, length: int) -> float:
        """log_prob / length^alpha, or log_prob / ((5 + length) / 6)^alpha for "gnmt"; an empty output counts as one."""
        return log_prob / self.size(length) ** self.alpha

    def size(self, length: int) -> float:
        """Return the length that the score is normalised by."""
        return (5 + length) / 6 if self.normalise == "gnmt" else float(max(length, 1))


@dataclass(slots=True)
class Stopping:
    """Abstract: the finished hypotheses of one source, and the rule that ends its search."""

    scoring: Scoring
    beams: int
    n_best: int
    limit: int  # tokens it may have
    finished: dict[tuple[int, ...], Hypothesis] = field(default_factory=dict)  # by their ids
    eos_at_limit: ClassVar[bool] = True
    strict: ClassVar[bool] = True

    @abstractmethod
    def done(self, live: float, length: int, topped: bool) -> bool:
        """Return whether the search can stop.

        Live hypotheses have `length` tokens, and the best of them log-probability `live`; `topped`: the best of all
        candidates ended, in this step or in an earlier one.
        """

    def add(self, hypothesis: Hypothesis) -> None:
        """Store a finished hypothesis; the same output of two groups counts once."""
        self.finished.setdefault(hypothesis.ids, hypothesis)

    def nth(self, n: int) -> float:
        """Return the score of the n-th best."""
        return sorted((each.score for each in self.finished.values()), reverse=True)[n - 1]

    def ranked(self) -> list[Hypothesis]:
        """Return the finished hypotheses, best first."""

        def key(hypothesis: Hypothesis) -> tuple[object, ...]:
            return (
                (not hypothesis.ended, *order(hypothesis.score, hypothesis.ids))
                if self.strict
                else (-hypothesis.score, hypothesis.ids)
            )

        return sorted(self.finished.values(), key=key)


class Optimal(Stopping):
    """Stop when no live hypothesis can beat the n_best-th finished one; the result is the best of the whole beam.

    Log-probabilities only fall and the coverage penalty is never positive, so a hypothesis of log-probability `live`
    can at best reach the score of `live` at the shortest or the longest length it may still have.
    """

    def done(self, live: float, length: int, topped: bool) -> bool:  # noqa: ARG002
        if len(self.finished) < self.n_best:
            return False
        reach = max(self.scoring.score(live, length + 1), self.scoring.score(live, self.limit + 1))
        return bucket(reach) < bucket(self.nth(self.n_best))


class First(Stopping):
    """Stop when n_best have ended."""

    def done(self, live: float, length: int, topped: bool) -> bool:  # noqa: ARG002
        return len(self.finished) >= self.n_best


class CTranslate2(Stopping):
    """As CTranslate2 4 with patience 1: stop when as many have ended as there are beams.

    Where a score is just a log-probability (length_penalty 0), stop when n_best have ended and one of them was the best
    candidate of its step. eos counts as a token of max_decoding_length, which is max_len here.

    Differs from the library: it renormalises over what min_decoding_length (1 if not given) and suppressed sequences
    leave, so give it min_decoding_length=0 to compare.
    """

    eos_at_limit, strict = False, False

    def done(self, live: float, length: int, topped: bool) -> bool:  # noqa: ARG002
        if self.scoring.alpha == 0.0:
            return topped and len(self.finished) >= self.n_best
        return len(self.finished) >= self.beams


class HuggingFace(Stopping):
    """As transformers 5, early_stopping=False: stop when `beams` hypotheses have ended and no live one is better.

    A live hypothesis is scored as if it ended now, and compared with the worst of the `beams` best finished ones.
    eos counts as a token of max_new_tokens, which is max_len here.
    """

    eos_at_limit, strict = False, False

    def done(self, live: float, length: int, topped: bool) -> bool:  # noqa: ARG002
        if len(self.finished) < self.beams:
            return False
        return not self.scoring.score(live, self.judged(length)) > self.nth(self.beams)

    def judged(self, length: int) -> int:
        """Return the length at which a live hypothesis is scored."""
        return length


class HuggingFaceEarly(HuggingFace):
    """As transformers 5, early_stopping=True: stop when as many have ended as there are beams."""

    def done(self, live: float, length: int, topped: bool) -> bool:  # noqa: ARG002
        return len(self.finished) >= self.beams


class HuggingFaceNever(HuggingFace):
    """As transformers 5, early_stopping="never": as "huggingface", scored at max_new_tokens if length_penalty > 0."""

    def judged(self, length: int) -> int:
        return self.limit if self.scoring.alpha > 0.0 else length


STOPPING: dict[str, type[Stopping]] = {
    "optimal": Optimal,
    "first": First,
    "ctranslate2": CTranslate2,
    "huggingface": HuggingFace,
    "huggingface_early": HuggingFaceEarly,
    "huggingface_never": HuggingFaceNever,
}
