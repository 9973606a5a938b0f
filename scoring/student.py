"""Student's t distribution for any degrees of freedom; infinite ones give the normal distribution."""

from __future__ import annotations

import math
from typing import Final

Z_95: Final = 1.959964
"""The quantile of the normal distribution for a two-sided probability of 95 %."""


def upper_tail(t: float, degrees: float) -> float:
    """Compute P(T > t). Without a degree of freedom nothing is known, so the result is ½."""
    if not degrees > 0 or math.isnan(t):
        return 0.5
    from scipy import special

    return float(special.stdtr(degrees, -t))


def quantile(probability: float, degrees: float) -> float:
    """Return the t that *probability* lies below; infinite without a degree of freedom."""
    if not degrees > 0:
        return math.copysign(math.inf, probability - 0.5)
    from scipy import special

    return float(special.stdtrit(degrees, probability))


def welch(*variances: tuple[float, float]) -> float:
    """Return the degrees of freedom of a sum of independent variances, each with its own (Welch 1947)."""
    terms = math.fsum(variance**2 / degrees for variance, degrees in variances if variance > 0)
    return math.fsum(variance for variance, _ in variances) ** 2 / terms if terms else math.inf
