"""Sums and means over the training steps since the metrics were last logged."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from regard.data.loader import Place
from regard.data.objectives import Item
from regard.training.executor import StepResult
from regard.training.parallel.group import ALONE, Group
from regard.training.ranking import Metrics


class StepRecord(NamedTuple):
    """A training step, with numbers in host memory."""

    step: int
    place: Place  # of the first batch of the step
    loss: float  # per label
    gradient: float  # norm before clipping


@dataclass
class LogWindow:
    """The results of the steps since the metrics were last logged, and sums over these steps."""

    results: list[StepResult] = field(default_factory=list)  # on their device, because copying would wait for it
    labels: list[int] = field(default_factory=list)  # for each step
    begins: list[tuple[int, Place]] = field(default_factory=list)  # number and place of each step
    places: int = 0
    padding: int = 0
    checked: int = 0  # number of steps that `unchecked` has returned
    began: float = field(default_factory=time.perf_counter)

    def add(self, step: int, place: Place, items: Sequence[Item], result: StepResult, labels: int) -> None:
        self.results.append(result)
        self.labels.append(labels)
        self.begins.append((step, place))
        self.places += sum(item.places for item in items)
        self.padding += sum(item.padding for item in items)

    def unchecked(self) -> Iterator[StepRecord]:
        """Yield the steps since the last call, after waiting until the device has finished them."""
        first, self.checked = self.checked, len(self.results)
        if first == self.checked:
            return
        numbers = torch.stack([torch.stack([each.loss, each.norm]) for each in self.results[first:]]).tolist()
        for (loss, norm), labels, begin in zip(numbers, self.labels[first:], self.begins[first:], strict=True):
            yield StepRecord(*begin, loss / labels, norm)

    def metrics(self, scaled: bool, group: Group = ALONE) -> Metrics:
        """Return the mean metrics, without steps that were skipped because their loss or gradient is not finite.

        If `scaled` is true, a step with an infinite gradient in float16 is skipped too, but its loss counts. The
        results are those of all processes in `group`, but each process counts the padding of its own batches.
        """
        seconds = time.perf_counter() - self.began
        losses, nlls, norms = (torch.stack(values).double() for values in zip(*self.results, strict=True))
        labels = torch.tensor(self.labels, device=losses.device)
        done = losses.isfinite() & norms.isfinite()
        counted = losses.isfinite() if scaled else done
        skipped = int((~done).sum())
        places, padding = group.sums([self.places, self.padding])
        return {
            "loss": float(losses[counted].sum() / labels[counted].sum()),
            "nll": float(nlls[counted].sum() / labels[counted].sum()),
            **({"gradient": float(norms[done].mean())} if skipped < len(norms) else {}),
            **({"skipped": skipped} if skipped else {}),
            "tokens_per_second": sum(self.labels) / seconds,
            "padding": padding / places,
        }
