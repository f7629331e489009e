"""Checks of the sizes and rates in a spec, with upper limits that catch mistyped sizes."""

import math

from regard.errors import SpecError

# Upper limits, so that a mistyped size raises an error instead of building a huge model.
MOST_BLOCKS = 4096  # per stack; DeepNet has 1,000
MOST_HEADS = 4096
MOST_TAPS = 2**16 - 1  # per convolution
MOST_EXPERTS = 2**16
MOST_CHANNELS = 2**20


def require(condition: bool, name: str, message: str) -> None:
    """Check `condition`. If it is false, raise a `SpecError` about the field `name`."""
    if not condition:
        raise SpecError(name, message)


def check_count(name: str, count: int | None, most: float | int = math.inf, least: int = 1) -> None:
    """Raise a `SpecError` about the field `name` if `count` is outside [least, most]. None is accepted."""
    if count is not None:
        require(count >= least, name, f"must be at least {least}, not {count}")
        require(count <= most, name, f"must be at most {most:,}, not {count:,}")


def check_rate(name: str, rate: float) -> None:
    """Raise a `SpecError` about the field `name` if `rate`, a probability or fraction, is outside [0, 1)."""
    require(0.0 <= rate < 1.0, name, f"must lie in [0, 1), not {rate}")


def check_not_negative(name: str, value: float | int) -> None:
    """Raise a `SpecError` about the field `name` if `value` is below 0."""
    require(value >= 0, name, f"must be at least 0, not {value}")


def check_above(name: str, value: float | int, bound: float | int) -> None:
    """Raise a `SpecError` about the field `name` if `value` is not above `bound`."""
    require(value > bound, name, f"must be above {bound:g}, not {value}")
