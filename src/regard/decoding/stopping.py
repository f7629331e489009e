"""Stopping rules for beam search: regard's own rules, and the exact rules of CTranslate2 and transformers."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from regard.decoding.hypothesis import Hypothesis
from regard.decoding.rank import bucket, order

Normalise = Literal["none", "mean", "gnmt"]


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scoring function of hypotheses: log_prob / length^alpha or, for "gnmt", log_prob / ((5 + length) / 6)^alpha.

    The length includes eos. In length^alpha, a length of 0 counts as 1.
    """

    normalise: Normalise
    alpha: float  # the power of the length; 0: scores are not normalised

    def score(self, log_prob: float, length: int) -> float:
        return log_prob / self.size(length) ** self.alpha

    def size(self, length: int) -> float:
        """Return the normaliser that is raised to the power alpha: (5 + length) / 6 for "gnmt", else the length."""
        return (5 + length) / 6 if self.normalise == "gnmt" else float(max(length, 1))


@dataclass(slots=True)
class Stopping:
    """Abstract base class of stopping rules. An instance collects the finished hypotheses for one source."""

    scoring: Scoring
    beams: int
    n_best: int
    limit: int  # maximum number of tokens in a hypothesis
    finished: dict[tuple[int, ...], Hypothesis] = field(default_factory=dict)  # ids -> hypothesis
    eos_at_limit: ClassVar[bool] = True  # a hypothesis of the maximum length may still end with eos
    # True: hypotheses cut at the limit rank behind those that ended with eos, and scores are compared in steps of 1e-5.
    # False: finished hypotheses are ranked by the exact score alone.
    strict: ClassVar[bool] = True

    @abstractmethod
    def done(self, live: float, length: int, topped: bool) -> bool:
        """Return whether the search can stop.

        `length` is the number of tokens in the live (unfinished) hypotheses, and `live` is the log-probability of the
        best live hypothesis. `topped` is true if the best candidate of this step or an earlier step ended with eos.
        """

    def add(self, hypothesis: Hypothesis) -> None:
        """Store a finished hypothesis. If two groups of beams find the same output, it is stored once."""
        self.finished.setdefault(hypothesis.ids, hypothesis)

    def nth(self, n: int) -> float:
        """Return the n-th best score of the finished hypotheses."""
        return sorted((each.score for each in self.finished.values()), reverse=True)[n - 1]

    def ranked(self) -> list[Hypothesis]:
        """Return the finished hypotheses, best first."""
        if self.strict:
            return sorted(self.finished.values(), key=lambda each: (not each.ended, *order(each.score, each.ids)))
        return sorted(self.finished.values(), key=lambda each: (-each.score, each.ids))


class Optimal(Stopping):
    """Stop when no live hypothesis can reach the score of the finished hypothesis with rank `n_best`.

    Log-probabilities only fall with each token, and the coverage penalty is never positive. The best score that a live
    hypothesis can reach is therefore its present log-probability, normalised by the shortest or the longest length that
    is still possible.
    """

    def done(self, live: float, length: int, topped: bool) -> bool:  # noqa: ARG002
        if len(self.finished) < self.n_best:
            return False
        reach = max(self.scoring.score(live, length + 1), self.scoring.score(live, self.limit + 1))
        return bucket(reach) < bucket(self.nth(self.n_best))


class First(Stopping):
    """Stop when `n_best` hypotheses have ended."""

    def done(self, live: float, length: int, topped: bool) -> bool:  # noqa: ARG002
        return len(self.finished) >= self.n_best


class CTranslate2(Stopping):
    """Stop as in CTranslate2 4 with patience 1: when `beams` hypotheses have ended.

    If scores are plain log-probabilities (length_penalty 0), stop when `n_best` hypotheses have ended and one of them
    was the best candidate in its step. As in the library, eos counts towards max_decoding_length (here: `max_len`).

    One thing differs: the library renormalises the probabilities when it excludes tokens. It excludes suppressed
    sequences, and eos as long as an output is shorter than min_decoding_length (default 1). For a comparison, call the
    library with min_decoding_length=0.
    """

    eos_at_limit, strict = False, False

    def done(self, live: float, length: int, topped: bool) -> bool:  # noqa: ARG002
        if self.scoring.alpha == 0.0:
            return topped and len(self.finished) >= self.n_best
        return len(self.finished) >= self.beams


class HuggingFace(Stopping):
    """Stop as in transformers 5 with early_stopping=False: when no live hypothesis beats the worst finished one.

    A live hypothesis is scored as if it ended now, and compared with the worst of the `beams` best finished hypotheses.
    As in the library, eos counts towards max_new_tokens (here: `max_len`).
    """

    eos_at_limit, strict = False, False

    def done(self, live: float, length: int, topped: bool) -> bool:  # noqa: ARG002
        return len(self.finished) >= self.beams and not self.scoring.score(live, length) > self.nth(self.beams)


class HuggingFaceEarly(HuggingFace):
    """Stop as in transformers 5 with early_stopping=True: when `beams` hypotheses have ended."""

    def done(self, live: float, length: int, topped: bool) -> bool:  # noqa: ARG002
        return len(self.finished) >= self.beams


class HuggingFaceNever(HuggingFace):
    """Stop as in transformers 5 with early_stopping="never".

    This is `HuggingFace` with one difference: if length_penalty > 0, live hypotheses are scored as if they had the
    maximum length.
    """

    def done(self, live: float, length: int, topped: bool) -> bool:
        return super().done(live, self.limit if self.scoring.alpha > 0.0 else length, topped)


STOPPING: dict[str, type[Stopping]] = {
    "optimal": Optimal,
    "first": First,
    "ctranslate2": CTranslate2,
    "huggingface": HuggingFace,
    "huggingface_early": HuggingFaceEarly,
    "huggingface_never": HuggingFaceNever,
}
