"""The text that is examined before training, and how a check of text is defined."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from regard.data.objectives import Objective
from regard.doctor.finding import Finding
from regard.doctor.reading import Examples, read_examples
from regard.recipe.recipe import RecipeRequest


@dataclass
class Case:
    """The training text, the validation text if it is given, and the task."""

    train: Examples
    valid: Examples | None
    request: RecipeRequest

    @classmethod
    def of(cls, request: RecipeRequest) -> "Case":
        """Read the text of a request."""
        data = request.data
        train = read_examples("training text", data.train, data.objective)
        valid = read_examples("validation text", data.valid, data.objective) if data.valid else None
        return cls(train, valid, request)

    @property
    def objective(self) -> Objective:
        return self.request.data.objective

    @property
    def texts(self) -> list[Examples]:
        """The training text and, if it is given, the validation text."""
        return [self.train] if self.valid is None else [self.train, self.valid]

    @property
    def names(self) -> list[str]:
        """The columns of natural text, such as source and target. Labels are not among them."""
        return [name for name in self.objective.texts if name != "label"]


@dataclass(frozen=True)
class TextCheck:
    """A check of text: a function that yields what it finds, and the tasks to which it applies."""

    name: str
    find: Callable[[Case], Iterable[Finding]]
    applies: Callable[[Objective], bool] = lambda _: True
    unless: str = ""  # the name of a check whose errors and warnings explain whatever this check would find


def is_pairs(objective: Objective) -> bool:
    """Return whether examples are pairs of source and target."""
    return objective.model == "sequence_to_sequence"


def is_translation(objective: Objective) -> bool:
    """Return whether source and target have similar lengths, unlike in summarization."""
    return is_pairs(objective) and not objective.summarizes


def is_labelled(objective: Objective) -> bool:
    """Return whether examples have a class label."""
    return objective.labelled


def has_examples(objective: Objective) -> bool:
    """Return whether the text has separate examples, unlike a stream, which is one long text."""
    return not objective.stream
