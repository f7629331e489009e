"""The size of a training text in tokens and examples, from which the planner chooses settings."""

from dataclasses import dataclass

from regard.data.batching import Batching
from regard.data.objectives import Objective
from regard.data.prepare import Survey
from regard.planner.speed import Lengths


@dataclass(frozen=True)
class TextSize:
    """The size of a training text in tokens and examples."""

    total: int  # number of tokens, source and target together
    labels: int  # number of tokens that are predicted, or that a classifier reads
    records: int  # number of training examples
    lengths: Lengths  # mean number of tokens of a source and of a target

    @property
    def epoch(self) -> int:
        """Number of tokens in one pass through the text, counted in the source or the target, whichever is longer."""
        return max(1, max(self.lengths) * self.records)


def text_size(objective: Objective, survey: Survey, batching: Batching) -> TextSize:
    """Return the size of a text from the counts in `survey`. In a stream of text, an example is one window."""
    columns = {name: survey.ids[name] for name in objective.measured}
    if objective.stream:
        window, tokens = getattr(batching, "length", 256), columns["target"]
        return TextSize(tokens, tokens, max(1, round(tokens / window)), (0, window))
    records = max(1, survey.kept)
    means = {name: max(1, round(count / records)) for name, count in columns.items()}
    lengths = (means.get("source", means.get("text", 0)), means.get("target", 0))
    return TextSize(sum(columns.values()), columns[objective.measured[-1]], records, lengths)
