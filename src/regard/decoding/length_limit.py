"""Limit the length of outputs by the training text: its longest target, and a line above its pairs of lengths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from regard.data.token_store import Table
from regard.errors import SpecError
from regard.tree import Spec

SHARE = 0.999  # of the training pairs that the line covers; the rest are mostly misaligned
SLACK, MORE = 1.5, 5  # other text may need more than the training text did
SLOPES = 64  # that are tried


@dataclass(frozen=True, slots=True)
class LengthLimit(Spec):
    """Most tokens of an output for a source of S tokens: 1.5 min(longest, slope S + constant) + 5, rounded up.

    S counts the end of the source, the output does not count its own.
    """

    kind = "length_limit"
    slope: float
    constant: int
    longest: int  # target of the training text

    def check(self) -> None:
        for name in ("slope", "constant", "longest"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise SpecError(name, f"must be a number of at least 0, not {value}")

    def most(self, source: int) -> int:
        """Return the limit for a source of this length."""
        return math.ceil(SLACK * min(self.longest, self.slope * source + self.constant)) + MORE

    def __str__(self) -> str:
        line = f"{self.slope:g} x source + {self.constant}"
        return f"{SLACK:g} x min({self.longest}, {line}) + {MORE} tokens"


def fit(sources: Int[np.ndarray, " n"], targets: Int[np.ndarray, " n"]) -> LengthLimit:
    """Return the lowest line that is at or above 99.9 % of the (source, target) lengths, and the longest target.

    For each slope, the smallest constant is a quantile of target - slope * source; of the slopes from 0 to that of a
    line through the origin, the one with the smallest mean over all sources is chosen.
    """
    width = int(targets.max()) + 1
    cells, counts = np.unique(sources.astype(np.int64) * width + targets, return_counts=True)
    source, target = cells // width, cells % width

    def quantile(values: np.ndarray) -> float:
        order = np.argsort(values, kind="stable")
        reached = np.cumsum(counts[order])
        return float(values[order][np.searchsorted(reached, SHARE * reached[-1])])

    def line(slope: float) -> tuple[float, float, int]:
        constant = max(0, math.ceil(quantile(target - slope * source)))
        return slope * mean + constant, slope, constant

    mean = float(np.average(source, weights=counts))
    steepest = quantile(target / np.maximum(source, 1))
    _, slope, constant = min(line(round(steepest * i / SLOPES, 3)) for i in range(SLOPES + 1))
    return LengthLimit(slope, constant, width - 1)


def of_tables(tables: Sequence[Table]) -> LengthLimit | None:
    """Return the limit of tables of translation pairs; None without a pair. Targets are stored with bos and eos."""
    sources = np.concatenate([table["source"].lengths for table in tables])
    targets = np.concatenate([table["target"].lengths for table in tables]) - 2
    return fit(sources, targets) if len(sources) else None


def widest(limits: Sequence[LengthLimit | None]) -> LengthLimit | None:
    """Return the limit that is at least each of several, of an ensemble or of the texts of a fine-tuned model.

    None, the limit of a run without a record, is not compared with others: it stays None.
    """
    known = [limit for limit in limits if limit is not None]
    if not known or len(known) < len(limits):
        return None
    return LengthLimit(
        max(each.slope for each in known), max(each.constant for each in known), max(each.longest for each in known)
    )
