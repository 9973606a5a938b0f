"""The cost of output tokens, from the hourly price of the hardware and the rate at which it generates them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

import numpy as np

from scoring.student import quantile

if TYPE_CHECKING:
    from scoring.arrays import Floats

MILLION: Final = 1e6
SECONDS_PER_HOUR: Final = 3600


@dataclass(frozen=True)
class PerMillion:
    """The cost of a million output tokens, in the price's currency."""

    value: float
    low: float
    high: float
    """95 % interval: percentiles 2.5 and 97.5 of the draws of the rate (Efron 1979). Infinite if that rate is 0."""


def per_million(price_per_hour: float, tokens_per_s: float, draws: Floats | None = None) -> PerMillion | None:
    """price / (3600 · rate) · 10⁶; None if the rate is 0 or was not measured.

    Args:
        price_per_hour: the price of all the hardware that the rate was measured on.
        tokens_per_s: output tokens per second.
        draws: bootstrap draws of the same rate, finite and not negative. None: the rate is exact.

    Raises:
        ValueError: the price is not a positive number.
    """
    if not 0 < price_per_hour < float("inf"):
        raise ValueError(f"a price of {price_per_hour} per hour")
    if not 0 < tokens_per_s < float("inf"):
        return None
    value = _cost(price_per_hour, tokens_per_s)
    if draws is None:
        return PerMillion(value, value, value)
    slow, fast = np.percentile(draws, [2.5, 97.5])
    # The interval always includes the value: percentiles of few rounds can both be on one side of it.
    low, high = _cost(price_per_hour, float(fast)), _cost(price_per_hour, float(slow))
    return PerMillion(value, min(low, value), max(high, value))


def _cost(price_per_hour: float, tokens_per_s: float) -> float:
    return price_per_hour / SECONDS_PER_HOUR / tokens_per_s * MILLION if tokens_per_s else math.inf


@dataclass(frozen=True)
class CostChange:
    """The change of the cost of a request, as a share: −0.3 is 30 % less."""

    value: float
    low: float | None
    high: float | None
    """95 % interval; None where each way of serving was started once, which does not show the noise of a start."""


def cost_change(before: Sequence[float], after: Sequence[float]) -> CostChange:
    """How the cost of a request changes if the same GPUs serve in another way: what an hour of a GPU costs is the same,
    so it is the inverse of the ratio of the rates per GPU.

    The interval is Student's t of the difference of the mean logarithms, with one variance for the starts of both ways
    of serving.

    Args:
        before: requests or tokens per second and GPU after each start; positive.
        after: the same with the other way of serving; its starts are not paired with the first ones.
    """
    logs = [[math.log(rate) for rate in rates] for rates in (before, after)]
    change = fmean(logs[0]) - fmean(logs[1])
    degrees = sum(len(log) - 1 for log in logs)
    if not degrees:
        return CostChange(math.expm1(change), None, None)
    squares = sum((one - fmean(log)) ** 2 for log in logs for one in log)
    spread = math.sqrt(squares / degrees * sum(1 / len(log) for log in logs))
    reach = quantile(0.975, degrees) * spread
    return CostChange(math.expm1(change), math.expm1(change - reach), math.expm1(change + reach))
