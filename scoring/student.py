"""Student's t distribution for any degrees of freedom."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

Z_95: Final = 1.959964
"""The quantile of the normal distribution for a two-sided probability of 95 %."""
TERMS: Final = 300
PRECISION: Final = 1e-14
NORMAL: Final = 1e6
"""From as many degrees of freedom on, the normal distribution is used."""


def upper_tail(t: float, degrees: float) -> float:
    """P(T > t). Without a degree of freedom nothing is known, so the result is ½.

    By the incomplete beta function (Abramowitz & Stegun 26.7.1), so that small probabilities keep their digits.
    """
    if not degrees > 0 or math.isnan(t):
        return 0.5
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    if degrees >= NORMAL:
        return math.erfc(t / math.sqrt(2)) / 2
    half = _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2
    return half if t >= 0 else 1 - half


def quantile(probability: float, degrees: float) -> float:
    """The t that *probability* lies below; infinite without a degree of freedom."""
    if not degrees > 0:
        return math.copysign(math.inf, probability - 0.5)
    if degrees >= NORMAL:
        return NormalDist().inv_cdf(probability)
    tail, high = min(probability, 1 - probability), 1.0
    while upper_tail(high, degrees) > tail:
        high *= 2
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, degrees) > tail else (low, middle)
    return math.copysign(high, probability - 0.5)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function (Abramowitz & Stegun 26.5.8), by Lentz's method."""
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, TERMS):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c, d = 1 + factor / c, 1 / (1 + factor * d)
            found *= c * d
        if abs(c * d - 1) < PRECISION:
            break
    return found
