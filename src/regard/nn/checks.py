"""Checks of the sizes and rates in a spec, and the largest sizes that are not misprints."""

from regard.errors import SpecError

# What is built or run one after the other: a misprint of some more digits is refused instead of never ending.
MOST_BLOCKS = 4096  # in a stack; DeepNet has 1,000
MOST_HEADS = 4096
MOST_TAPS = 2**16 - 1  # of a convolution
MOST_EXPERTS = 2**16
MOST_CHANNELS = 2**20


def check_count(name: str, count: int | None, most: int | None = None, least: int = 1) -> None:
    """Refuse a number of parts or channels outside of [least, most]; None stands for a default."""
    if count is not None and count < least:
        raise SpecError(name, f"must be at least {least}, not {count}")
    if count is not None and most is not None and count > most:
        raise SpecError(name, f"must be at most {most:,}, not {count:,}")


def check_rate(name: str, rate: float) -> None:
    """Refuse a probability of dropping, or a share, outside of [0, 1)."""
    if not 0.0 <= rate < 1.0:
        raise SpecError(name, f"must lie in [0, 1), not {rate}")


def check_not_negative(name: str, value: float | int) -> None:
    """Refuse a number below 0."""
    if value < 0:
        raise SpecError(name, f"must not be negative, not {value}")


def check_above(name: str, value: float | int, bound: float | int) -> None:
    """Refuse a number that is not above a bound."""
    if value <= bound:
        raise SpecError(name, f"must be above {bound:g}, not {value}")
