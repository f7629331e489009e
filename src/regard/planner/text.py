"""The sizes of a training text, on which a plan is based."""

from dataclasses import dataclass

from regard.data.batching import Batching
from regard.data.objectives import Objective
from regard.data.prepare import Survey
from regard.planner.speed import Lengths


@dataclass(frozen=True)
class Text:
    """The sizes of a training text."""

    total: int  # number of tokens, source and target together
    labels: int  # number of tokens that are predicted, or that a classifier reads
    records: int
    lengths: Lengths  # mean tokens of a source and a target

    @property
    def epoch(self) -> int:
        """Number of tokens in one pass, counting source or target, whichever is longer."""
        return max(1, max(self.lengths) * self.records)


def described(objective: Objective, survey: Survey, batching: Batching) -> Text:
    """Return the sizes of the surveyed text. Continuous text is divided into windows."""
    columns = {name: survey.ids[name] for name in objective.measured}
    if objective.stream:
        window, tokens = getattr(batching, "length", 256), columns["target"]
        return Text(tokens, tokens, max(1, round(tokens / window)), (0, window))
    records = max(1, survey.kept)
    means = {name: max(1, round(count / records)) for name, count in columns.items()}
    lengths = (means.get("source", means.get("text", 0)), means.get("target", 0))
    return Text(sum(columns.values()), columns[objective.measured[-1]], records, lengths)
