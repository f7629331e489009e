"""Length limits of translations: a linear function of the source length, fitted to the training text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from regard.data.token_store import Table
from regard.nn.checks import require
from regard.tree import Spec

SHARE = 0.999  # share of the training pairs whose target is within the limit; the others are mostly misaligned
SLACK, MORE = 1.5, 5  # factor and constant, because other text may need longer outputs than the training text
SLOPES = 64  # number of slopes that are tried


@dataclass(frozen=True, slots=True)
class LengthLimit(Spec):
    """The maximum length of an output for a source of S tokens: 1.5 * min(longest, slope * S + constant) + 5.

    The maximum is rounded up. S includes eos, and the length of the output does not.
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
        """Return the maximum output length for a source of `source` tokens."""
        return math.ceil(SLACK * min(self.longest, self.slope * source + self.constant)) + MORE

    def __str__(self) -> str:
        line = f"{self.slope:g} x source + {self.constant}"
        return f"{SLACK:g} x min({self.longest}, {line}) + {MORE} tokens"


def fit(sources: Int[np.ndarray, " n"], targets: Int[np.ndarray, " n"]) -> LengthLimit:
    """Fit the length limit to the source and target lengths of training pairs.

    99.9 % of the targets must have at most slope * source + constant tokens. For each slope from 0 to the slope that
    needs no constant, the constant is the 99.9 % quantile of target - slope * source. The slope and constant with the
    smallest mean limit over all sources are chosen.
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
    """Return the length limit fitted to tables of tokenized translation pairs, or None if the tables are empty."""
    sources = np.concatenate([table["source"].lengths for table in tables])
    targets = np.concatenate([table["target"].lengths for table in tables]) - 2  # without bos and eos
    return fit(sources, targets) if len(sources) else None


def widest(limits: Sequence[LengthLimit | None]) -> LengthLimit | None:
    """Return a length limit that is at least as high as each of the given limits.

    The limits come from the models of an ensemble or from the texts of a fine-tuned model. A model that was saved
    without a limit has the limit None. If `limits` is empty or contains None, the result is None.
    """
    known = [limit for limit in limits if limit is not None]
    if not known or len(known) < len(limits):
        return None
    highest = (max(getattr(limit, name) for limit in known) for name in ("slope", "constant", "longest"))
    return LengthLimit(*highest)
