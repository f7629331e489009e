"""Student's t, Fisher's F and the chi, from the incomplete beta function and the standard library."""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

SMALL = 1e-300  # stands for a divisor of 0 in a continued fraction


def incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), the regularised incomplete beta function: Lentz's continued fraction (Press et al. 2007, 6.4)."""
    if x <= 0.0 or x >= 1.0:
        return float(x > 0.0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):  # the fraction converges quickly on the other side
        return 1.0 - front * _fraction(b, a, 1.0 - x) / b
    return front * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1) or SMALL)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / (1.0 + term * d or SMALL)
            c = 1.0 + term / c or SMALL
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def two_sided(t: float, freedom: float) -> float:
    """P(|T| >= |t|) for Student's t."""
    if math.isinf(t):
        return 0.0
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def f_above(ratio: float, first: float, second: float) -> float:
    """P(F >= ratio) for Fisher's F with `first` and `second` degrees of freedom."""
    if math.isinf(ratio):
        return 0.0
    return incomplete_beta(second / 2, first / 2, second / (second + first * max(ratio, 0.0)))


@lru_cache(maxsize=4096)
def critical(level: float, freedom: float) -> float:
    """The t with P(|T| >= t) = level."""
    return root(lambda t: level - two_sided(t, freedom), 1e6)


@lru_cache(maxsize=64)
def chi(freedom: float, nodes: int = 80) -> tuple[list[float], list[float]]:
    """Points x and weights of the distribution of sqrt(chi-square / freedom)."""
    wide = 9.0 / math.sqrt(2 * freedom)
    low, high = max(0.0, 1.0 - wide), 1.0 + wide
    places, weights = np.polynomial.legendre.leggauss(nodes)
    x = low + (places + 1) / 2 * (high - low)
    log_density = (freedom - 1) * np.log(x) - freedom * x * x / 2
    density = weights * np.exp(log_density - log_density.max())
    return x.tolist(), (density / density.sum()).tolist()


def root(rising: Callable[[float], float], most: float) -> float:
    """Where a function that rises from below 0 at 0 meets 0."""
    low, high = 0.0, 1.0
    while rising(high) < 0 and high < most:
        low, high = high, 2 * high
    while high - low > 1e-11 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
