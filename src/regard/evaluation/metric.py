"""The base class of metrics, which score outputs against references. `regard.evaluation.metrics` lists all metrics."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from regard.errors import DataError, SpecError

References = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a corpus. The signature contains the settings of the metric; without settings, it is empty."""

    value: float
    signature: str
    name: str


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The negative log-likelihood of a text in nats. End tokens of lines are counted if the model predicts them."""

    nll: float
    tokens: int
    bytes: int = 0

    @property
    def loss(self) -> float:
        """The mean negative log-likelihood, in nats per token."""
        return self.nll / self.tokens


class Metric(ABC):
    """Base class of metrics: the score of a corpus is a function of sums over segments.

    A segment is one line, one example or one text. `segment` returns K statistics for each segment, and the score is
    `value` of the summed statistics. A bootstrap resample is scored in the same way from the segments in the resample.
    """

    name: ClassVar[str]  # for recipes, options and JSON
    title: ClassVar[str]  # for sentences
    heading: ClassVar[str]  # for tables and the console; by default the title
    higher_is_better: ClassVar[bool] = True
    # What a segment is: an output text with its references, a predicted label with the true one, or a Likelihood.
    needs: ClassVar[Literal["text", "labels", "likelihood"]] = "text"
    # True if the score is the percentage of segments that are right: the statistics of a segment are (1 or 0, 1).
    proportion: ClassVar[bool] = False
    companions: ClassVar[tuple[str, ...]] = ()  # metrics that an ablation stores together (ROUGE has three)
    package: ClassVar[str | None] = None  # the package of the extra `metrics` that computes the metric
    digits: ClassVar[int] = 1  # after the decimal point
    unit: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "title" in vars(cls) and "heading" not in vars(cls):
            cls.heading = cls.title

    @classmethod
    def installed(cls) -> bool:
        """Return whether the package that computes the metric is installed. Most metrics need none."""
        return cls.package is None or importlib.util.find_spec(cls.package) is not None

    @property
    def full_title(self) -> str:
        """The title with the settings that sacreBLEU includes in it, such as `chrF2++`."""
        return self.title

    def segment(self, output: Any, references: Sequence[Any]) -> Sequence[float | int]:  # noqa: ARG002
        """Return the K statistics of one output; `references` has one reference from each reference list."""
        raise SpecError("metric", f"{type(self).__name__} has no method segment(output, references); define it")

    @abstractmethod
    def value(self, total: Float[np.ndarray, " K"]) -> float:
        """Return the score for `total`, the sums of the statistics of all segments."""

    def statistics(self, outputs: Sequence[Any], references: Sequence[Any] = ()) -> Float[np.ndarray, "N K"]:
        """Return an array with the statistics of all segments, one row per segment."""
        return np.array([self.segment(*pair) for pair in self.pairs(outputs, references)], dtype=np.float64)

    def score(self, outputs: Sequence[Any], references: Sequence[Any] = ()) -> Score:
        """Return the score of a corpus; `references` is one list as long as `outputs`, or several such lists."""
        total = self.statistics(outputs, references).sum(0)
        return Score(float(self.value(total)), self.signature(reference_lists(references)), self.full_title)

    def signature(self, references: int, **bootstrap: int) -> str:  # noqa: ARG002
        """Return the signature: the settings of the metric and of the bootstrap, and the number of reference lists."""
        return ""

    def with_tokenizer(self, tokenize: str) -> "Metric":  # noqa: ARG002
        """Return the metric with the sacreBLEU tokenizer `tokenize`, or unchanged if the metric does not tokenize."""
        return self

    def pairs(self, outputs: Sequence[Any], references: Sequence[Any]) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yield every output with its references; raise DataError if the lists differ in length."""
        if self.needs == "text":
            yield from zip(outputs, zip(*reference_streams(outputs, references), strict=True), strict=True)
        elif self.needs == "labels":
            check_lines("predictions", outputs, "labels", references)
            yield from ((output, (label,)) for output, label in zip(outputs, references, strict=True))
        else:
            yield from ((output, ()) for output in outputs)

    def text(self, value: float) -> str:
        """Return a value with the digits and the unit of this metric, such as `31.2` or `88.4 %`."""
        return f"{value:.{self.digits}f}{self.unit}"


def reference_lists(references: Sequence[Any]) -> int:
    """Return the number of reference lists."""
    return 1 if not references or isinstance(references[0], str) else len(references)


def reference_streams(outputs: Sequence[str], references: References) -> list[list[str]]:
    """Return the references as a list of reference lists; raise DataError if a list is not as long as `outputs`."""
    if isinstance(outputs, str) or isinstance(references, str):
        raise DataError("hypotheses and references are lists of lines, not one text; split it into lines")
    single = not references or isinstance(references[0], str)
    streams = [[str(line) for line in stream] for stream in ([references] if single else references)]
    for number, stream in enumerate(streams, start=1):
        check_lines("hypotheses", outputs, "references" if single else f"reference list {number}", stream)
    return streams


def check_lines(name: str, lines: Sequence[Any], other: str, others: Sequence[Any]) -> None:
    """Raise DataError if two lists of lines differ in length or are empty."""
    if len(lines) != len(others):
        raise DataError(f"{name}: {len(lines)} lines, but {other} has {len(others)}; they must be aligned line by line")
    if not len(lines):
        raise DataError(f"{name}: 0 lines and {other} has 0; there is nothing to score")
