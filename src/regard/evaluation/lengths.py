"""Buckets of held-out lines, grouped by source length, to measure how quality depends on length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regard.errors import SpecError


@dataclass(frozen=True, slots=True)
class Bucket:
    """The indices of the lines whose sources have from `least` to `most` tokens."""

    least: int
    most: int
    lines: tuple[int, ...]

    @property
    def name(self) -> str:
        """The range of lengths, such as `5-9`, or one length, such as `5`."""
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def buckets(lengths: Sequence[int], count: int = 4) -> list[Bucket]:
    """Group lines by source length into at most `count` buckets of similar size. Equal lengths stay together."""
    if count < 1:
        raise SpecError("buckets", f"must be at least 1, not {count}")
    values, many = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
    before = np.concatenate(([0], np.cumsum(many)))[:-1]
    # Sort all lines by length: the rank of the middle line of each length determines the bucket of that length.
    which = ((before + many / 2) * count / max(1, len(lengths))).astype(np.int64)
    result = []
    for bucket in np.unique(which):
        inside = values[which == bucket]
        least, most = int(inside[0]), int(inside[-1])
        result.append(Bucket(least, most, tuple(i for i, n in enumerate(lengths) if least <= n <= most)))
    return result
