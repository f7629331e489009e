"""Metric slot: a score of outputs against references. `regard.evaluation.metrics` has the table of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from regard.errors import DataError

References = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a corpus; the signature records how it was computed (empty if the name is enough)."""

    value: float
    signature: str
    name: str


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Negative log-likelihood of a text in nats; tokens include the end of every line where the model predicts it."""

    nll: float
    tokens: int
    bytes: int = 0

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens


class Metric(ABC):
    """Slot: the score of a corpus as a function of sums over its segments.

    A segment is one line, one example or one text. `segment` returns K statistics of each, and the score is `value` of
    their sums; a resample of the bootstrap is scored from the sums over its segments.
    """

    name: ClassVar[str]  # in recipes, options and JSON
    title: ClassVar[str]  # in sentences
    heading: ClassVar[str]  # in tables and on the console; the title if not given
    higher_is_better: ClassVar[bool] = True
    # What a segment is: an output text with its references, a predicted label with the true one, or a Likelihood.
    needs: ClassVar[Literal["text", "labels", "likelihood"]] = "text"
    proportion: ClassVar[bool] = False  # the percentage of segments that are right; statistics are (1 or 0, 1)
    companions: ClassVar[tuple[str, ...]] = ()  # metrics that an ablation stores beside it: ROUGE is reported as three
    digits: ClassVar[int] = 1  # after the decimal point
    unit: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "title" in vars(cls) and "heading" not in vars(cls):
            cls.heading = cls.title

    @property
    def full_title(self) -> str:
        """The title with the settings that belong to it, as sacreBLEU writes it: `chrF2++`."""
        return self.title

    def segment(self, output: Any, references: Sequence[Any]) -> Sequence[float | int]:
        """Return the statistics of one output and its references (one for each list of references)."""
        raise NotImplementedError

    @abstractmethod
    def value(self, total: Float[np.ndarray, " K"]) -> float:
        """Return the score of segments whose statistics have these sums."""

    def statistics(self, outputs: Sequence[Any], references: Sequence[Any] = ()) -> Float[np.ndarray, "N K"]:
        """Return the statistics of every segment."""
        return np.array([self.segment(*pair) for pair in self.pairs(outputs, references)], dtype=np.float64)

    def score(self, outputs: Sequence[Any], references: Sequence[Any] = ()) -> Score:
        """Return the score of a corpus. References are one for each output, or several such lists."""
        total = self.statistics(outputs, references).sum(0)
        return Score(float(self.value(total)), self.signature(reference_lists(references)), self.full_title)

    def signature(self, references: int, **bootstrap: int) -> str:  # noqa: ARG002
        """Return a record of how the score is computed from `references` lists, and the settings of a bootstrap."""
        return ""

    def with_tokenizer(self, tokenize: str) -> "Metric":  # noqa: ARG002
        """Return the metric with this tokenizer of sacreBLEU, if it uses one."""
        return self

    def pairs(self, outputs: Sequence[Any], references: Sequence[Any]) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yield every output with its references; refuse lists that are not aligned."""
        if self.needs == "text":
            yield from zip(outputs, zip(*reference_streams(outputs, references), strict=True), strict=True)
        elif self.needs == "labels":
            check_lines("predictions", outputs, "labels", references)
            yield from ((output, (label,)) for output, label in zip(outputs, references, strict=True))
        else:
            yield from ((output, ()) for output in outputs)

    def text(self, value: float) -> str:
        """Return a value of this metric with its usual digits: `31.2`, `88.4 %`."""
        return f"{value:.{self.digits}f}{self.unit}"


def reference_lists(references: Sequence[Any]) -> int:
    """Return the number of reference lists."""
    return 1 if not references or isinstance(references[0], str) else len(references)


def reference_streams(outputs: Sequence[str], references: References) -> list[list[str]]:
    """Return references as lists that are each as long as the outputs; refuse others."""
    if isinstance(outputs, str) or isinstance(references, str):
        raise DataError("hypotheses and references are lists of lines, not one text; split it into lines")
    single = not references or isinstance(references[0], str)
    streams = [[str(line) for line in stream] for stream in ([references] if single else references)]
    for number, stream in enumerate(streams, start=1):
        check_lines("hypotheses", outputs, "references" if single else f"reference list {number}", stream)
    return streams


def check_lines(name: str, lines: Sequence[Any], other: str, others: Sequence[Any]) -> None:
    """Refuse lists of different lengths, and empty ones."""
    if len(lines) != len(others):
        raise DataError(f"{name}: {len(lines)} lines, but {other} has {len(others)}; every line needs its partner")
    if not len(lines):
        raise DataError(f"{name}: 0 lines and {other} has 0; there is nothing to score")
