"""Coverage penalty for source tokens that an output does not attend to (Wu et al. 2016)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.decoding.ensemble import Decodings


class Coverage:
    """Sums the attention of each beam to each source token over its output tokens. Does nothing if `weight` is 0."""

    def __init__(self, weight: float, rows: int) -> None:
        self.weight = weight
        self.before: Tensor | None = None
        self.now: Tensor | None = None
        self.nothing = [0.0] * rows

    def record(self, decodings: Decodings) -> None:
        if self.weight:
            attention = decodings.attention()
            self.now = attention if self.before is None else self.before + attention

    def penalties(self) -> tuple[list[float], list[float]]:
        """Return the penalties of all beams before and after the last step.

        The penalty is `weight` * sum_j log(min(c_j, 1)), where c_j is the total attention to source token j. Source
        positions without any attention are padding and are left out of the sum.
        """
        return self._penalty(self.before), self._penalty(self.now)

    def _penalty(self, covered: Float[Tensor, "B S"] | None) -> list[float]:
        if covered is None:
            return self.nothing
        wide = covered.double()
        return (self.weight * wide.clamp(max=1.0).where(wide > 0.0, 1.0).log().sum(-1)).tolist()

    def follow(self, origin: Sequence[int]) -> None:
        """Reorder the summed attention after a step: new beam i continues the former beam `origin[i]`."""
        if self.now is not None:
            self.before = self.now.index_select(0, torch.tensor(origin, dtype=torch.int64, device=self.now.device))
