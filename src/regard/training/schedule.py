"""Learning rate schedules: the learning rate at each step, relative to its peak. Schedules have no state."""

import math
from abc import abstractmethod
from dataclasses import dataclass

from regard.nn.checks import require
from regard.tree import Spec


class Schedule(Spec):
    """Abstract base class of learning rate schedules. Steps are counted from 1."""

    __slots__ = ()

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the learning rate at `step` of `steps`, divided by the peak learning rate."""


def warm(step: int, warmup: int | None) -> float:
    """Return the factor of a linear warm-up, which rises to 1 over `warmup` steps. It is 1 without a warm-up."""
    return min(1.0, step / warmup) if warmup else 1.0


def check_settings(warmup: int | None, **shares: float) -> None:
    """Raise SpecError if `warmup` is negative, or if one of the other settings is outside [0, 1]."""
    require(warmup is None or warmup >= 0, "warmup", f"must be at least 0, not {warmup}")
    for name, share in shares.items():
        require(0.0 <= share <= 1.0, name, f"must lie in [0, 1], not {share}")


@dataclass(frozen=True, slots=True)
class Constant(Schedule):
    """Linear warm-up, then the peak learning rate."""

    kind = "constant"
    warmup: int | None = None  # None: chosen from the number of steps

    def check(self) -> None:
        check_settings(self.warmup)

    def factor(self, step: int, steps: int) -> float:  # noqa: ARG002
        return warm(step, self.warmup)


@dataclass(frozen=True, slots=True)
class InverseSqrt(Schedule):
    """Linear warm-up, then inverse square root decay (Vaswani et al. 2017): min(step / warmup, sqrt(warmup / step))."""

    kind = "inverse_sqrt"
    warmup: int | None = None

    def check(self) -> None:
        check_settings(self.warmup)

    def factor(self, step: int, steps: int) -> float:  # noqa: ARG002
        warmup = max(1, self.warmup or 1)
        return min(step / warmup, math.sqrt(warmup / step))


@dataclass(frozen=True, slots=True)
class LinearDecay(Schedule):
    """Linear warm-up, then linear decay that would reach `floor` times the peak one step after the last step."""

    kind = "linear"
    warmup: int | None = None
    floor: float = 0.0

    def check(self) -> None:
        check_settings(self.warmup, floor=self.floor)

    def factor(self, step: int, steps: int) -> float:
        return warm(step, self.warmup) * (1 - _progress(step, self.warmup or 0, steps) * (1 - self.floor))


@dataclass(frozen=True, slots=True)
class Cosine(Schedule):
    """Linear warm-up, then half a cosine down to `floor` times the peak (Loshchilov and Hutter 2017)."""

    kind = "cosine"
    warmup: int | None = None
    floor: float = 0.0

    def check(self) -> None:
        check_settings(self.warmup, floor=self.floor)

    def factor(self, step: int, steps: int) -> float:
        done = _progress(step, self.warmup or 0, steps)
        return warm(step, self.warmup) * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True, slots=True)
class WarmupStableDecay(Schedule):
    """Linear warm-up, then the peak learning rate, then linear decay to `floor` times the peak (Hu et al. 2024).

    `decay` is the share of the steps in which the learning rate decays.
    """

    kind = "warmup_stable_decay"
    warmup: int | None = None
    decay: float = 0.2
    floor: float = 0.0

    def check(self) -> None:
        check_settings(self.warmup, decay=self.decay, floor=self.floor)

    def factor(self, step: int, steps: int) -> float:
        begin = max(round((1 - self.decay) * steps), self.warmup or 0)
        return warm(step, self.warmup) * (1 - _progress(step, begin, steps) * (1 - self.floor))


def _progress(step: int, begin: int, steps: int) -> float:
    """Return the fraction of the steps after `begin` that are before `step`. At the last step, it is below 1."""
    return min(1.0, max(0, step - begin - 1) / max(1, steps - begin)) if step > begin else 0.0
