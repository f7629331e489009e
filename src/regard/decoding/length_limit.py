"""Length limits for outputs, from the longest training target and a line above the (source, target) lengths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from regard.data.token_store import Table
from regard.nn.checks import require
from regard.tree import Spec

SHARE = 0.999  # share of the training pairs at or below the line; the other pairs are mostly misaligned
SLACK, MORE = 1.5, 5  # other text may need longer outputs than the training text
SLOPES = 64  # number of slopes that are tried


@dataclass(frozen=True, slots=True)
class LengthLimit(Spec):
    """The maximum length of an output for a source of S tokens: 1.5 min(longest, slope S + constant) + 5, rounded up.

    S includes the eos of the source. The length of the output does not include eos.
    """

    kind = "length_limit"
    slope: float
    constant: int
    longest: int  # number of tokens in the longest target of the training text

    def check(self) -> None:
        for name in ("slope", "constant", "longest"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, name, f"must be a number of at least 0, not {value}")

    def most(self, source: int) -> int:
        """Return the limit for a source of length `source`."""
        return math.ceil(SLACK * min(self.longest, self.slope * source + self.constant)) + MORE

    def __str__(self) -> str:
        line = f"{self.slope:g} x source + {self.constant}"
        return f"{SLACK:g} x min({self.longest}, {line}) + {MORE} tokens"


def fit(sources: Int[np.ndarray, " n"], targets: Int[np.ndarray, " n"]) -> LengthLimit:
    """Return the limit with the longest target and the lowest line at or above 99.9 % of the (source, target) lengths.

    Slopes are tried from 0 to the slope of a line through the origin. For each slope, the smallest possible constant is
    a quantile of target - slope * source. The line with the smallest mean over all sources is chosen.
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
    """Return the limit fitted to token tables of translation pairs; None if there is no pair."""
    sources = np.concatenate([table["source"].lengths for table in tables])
    targets = np.concatenate([table["target"].lengths for table in tables]) - 2  # without bos and eos
    return fit(sources, targets) if len(sources) else None


def widest(limits: Sequence[LengthLimit | None]) -> LengthLimit | None:
    """Return a limit that is at least as high as each of the given limits; None if one of them is None.

    The limits come from the models of an ensemble or from the texts of a fine-tuned model. None is the limit of a run
    that did not store one.
    """
    known = [limit for limit in limits if limit is not None]
    if not known or len(known) < len(limits):
        return None
    highest = (max(getattr(limit, name) for limit in known) for name in ("slope", "constant", "longest"))
    return LengthLimit(*highest)
