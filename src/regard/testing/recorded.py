"""The attention weights that the reference kernel uses, with which a law compares the recorded weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.batch import Batch
from regard.models.base import LanguageModel
from regard.nn import attention
from regard.nn.mask import View
from regard.nn.trace import Trace


class OrderedTrace(Trace):
    """Trace that also has the names and weights of all layers in the order in which they were added."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, Tensor]] = []

    def add(self, name: str, weights: Float[Tensor, "B H T S"]) -> None:
        super().add(name, weights)
        self.entries.append((name, weights))


@contextmanager
def used_weights() -> Iterator[list[Float[Tensor, "B H T _S"]]]:
    """Context manager that collects the weights by which the reference kernel multiplies the values, in order."""
    kernel, used = attention.softmax, []

    def softmax(scores: Tensor, view: View) -> Tensor:
        used.append(kernel(scores, view))
        return used[-1]

    attention.softmax = softmax
    try:
        yield used
    finally:
        attention.softmax = kernel


def by_entry(used: Sequence[Tensor], entries: int) -> list[Tensor]:
    """Return the used weights of every entry of a trace.

    A recurrent decoder attends step by step, and its trace has one entry for all steps. For such an entry, the weights
    of the steps are concatenated along the queries, with 0 for keys that a step does not have.
    """
    if entries == 0 or len(used) % entries:
        return list(used)
    return [widened(used[first::entries]) for first in range(entries)]


def widened(steps: Sequence[Float[Tensor, "B H _T _S"]]) -> Float[Tensor, "B H T S"]:
    """Return the weights of several steps as one matrix. Keys that a step does not have yet have the weight 0."""
    S = max(step.shape[3] for step in steps)
    return torch.cat([F.pad(step, (0, S - step.shape[3])) for step in steps], 2)


def stepwise(
    model: LanguageModel, batch: Batch, tokens: Sequence[int], layers: Mapping[str, int]
) -> dict[str, list[Tensor]]:
    """Return the weights recorded in decoding, with the steps of a layer joined to one matrix.

    The steps read `tokens[0]`, `tokens[1]`, ... tokens. `layers` has the number of attention layers of every kind.
    """
    with torch.no_grad():
        decoding = model.start(batch, sum(tokens))
        decoding.trace = Trace()
        for ids in batch.target[:, : sum(tokens)].split(list(tokens), 1):
            model.advance(ids, decoding)
    recorded = decoding.trace.weights
    return {name: [widened(steps[n :: layers[name]]) for n in range(layers[name])] for name, steps in recorded.items()}
