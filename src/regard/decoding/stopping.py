"""When a beam search has found enough: our rules, and those of two other libraries, exactly.

The libraries differ in more than when they stop, and all of it changes what is found, so a name stands for all of it:

- `asks_again`: a hypothesis that has all the tokens it may have is still asked whether it ends there.
- `strict`: hypotheses that came to no end rank behind all that did, and scores within 1e-5 are equal. Otherwise the
  score alone ranks what is over, to the last bit.
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
        """log_prob / length^alpha, or log_prob / ((5 + length) / 6)^alpha for "gnmt"; nothing said counts as one."""
        return log_prob / self.size(length) ** self.alpha

    def size(self, length: int) -> float:
        """What a length counts as."""
        return (5 + length) / 6 if self.normalise == "gnmt" else float(max(length, 1))


@dataclass(slots=True)
class Stopping:
    """Abstract: the hypotheses of one source that are over, and whether there are enough."""

    scoring: Scoring
    beams: int
    n_best: int
    limit: int  # tokens it may have
    found: dict[tuple[int, ...], Hypothesis] = field(default_factory=dict)  # by their ids
    asks_again: ClassVar[bool] = True
    strict: ClassVar[bool] = True

    @abstractmethod
    def done(self, live: float, said: int, topped: bool) -> bool:
        """Whether it needs no more.

        All that go on have `said` tokens, and the best of them log-probability `live`; `topped` is whether the best of
        all candidates has ended, in this step or in an earlier one.
        """

    def add(self, one: Hypothesis) -> None:
        """Remember a hypothesis that is over; a text that two groups have found counts once."""
        self.found.setdefault(one.ids, one)

    def nth(self, n: int) -> float:
        """The score of the n-th best."""
        return sorted((one.score for one in self.found.values()), reverse=True)[n - 1]

    def ranked(self) -> list[Hypothesis]:
        """What was found, best first."""

        def key(one: Hypothesis) -> tuple[object, ...]:
            return (not one.ended, *order(one.score, one.ids)) if self.strict else (-one.score, one.ids)

        return sorted(self.found.values(), key=key)


class Optimal(Stopping):
    """Stop when nothing that goes on can beat the n_best-th that ended: what is found is the best of the whole beam.

    Log-probabilities only fall and the coverage penalty is never positive, so a hypothesis of log-probability `live`
    can at best reach the score of `live` at the shortest or the longest length it may still have.
    """

    def done(self, live: float, said: int, topped: bool) -> bool:  # noqa: ARG002
        if len(self.found) < self.n_best:
            return False
        reach = max(self.scoring.score(live, said + 1), self.scoring.score(live, self.limit + 1))
        return bucket(reach) < bucket(self.nth(self.n_best))


class First(Stopping):
    """Stop when n_best have ended."""

    def done(self, live: float, said: int, topped: bool) -> bool:  # noqa: ARG002
        return len(self.found) >= self.n_best


class CTranslate2(Stopping):
    """As CTranslate2 4 with patience 1: stop when as many have ended as there are beams.

    Where a score is just a log-probability (length_penalty 0), stop when n_best have ended and one of them was the best
    candidate of its step. eos counts as a token of max_decoding_length, which is max_len here.

    Differs from the library: it renormalises over what min_decoding_length (1 if not given) and suppressed sequences
    leave, so give it min_decoding_length=0 to compare.
    """

    asks_again, strict = False, False

    def done(self, live: float, said: int, topped: bool) -> bool:  # noqa: ARG002
        if self.scoring.alpha == 0.0:
            return topped and len(self.found) >= self.n_best
        return len(self.found) >= self.beams


class HuggingFace(Stopping):
    """As transformers 5, early_stopping=False: as many as there are beams, and the best that goes on is no better.

    What goes on is judged as if it ended where it is now, and compared with the worst of the `beams` best that ended.
    eos counts as a token of max_new_tokens, which is max_len here.
    """

    asks_again, strict = False, False

    def done(self, live: float, said: int, topped: bool) -> bool:  # noqa: ARG002
        if len(self.found) < self.beams:
            return False
        return not self.scoring.score(live, self.judged(said)) > self.nth(self.beams)

    def judged(self, said: int) -> int:
        """The length at which what goes on is judged."""
        return said


class HuggingFaceEarly(HuggingFace):
    """As transformers 5, early_stopping=True: stop when as many have ended as there are beams."""

    def done(self, live: float, said: int, topped: bool) -> bool:  # noqa: ARG002
        return len(self.found) >= self.beams


class HuggingFaceNever(HuggingFace):
    """As transformers 5, early_stopping="never": as "huggingface", judged at max_new_tokens if length_penalty > 0."""

    def judged(self, said: int) -> int:
        return self.limit if self.scoring.alpha > 0.0 else said


STOPPING: dict[str, type[Stopping]] = {
    "optimal": Optimal,
    "first": First,
    "ctranslate2": CTranslate2,
    "huggingface": HuggingFace,
    "huggingface_early": HuggingFaceEarly,
    "huggingface_never": HuggingFaceNever,
}
