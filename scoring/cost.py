"""The cost of output tokens, from the hourly price of the hardware and the rate at which it generates them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from scoring.lead import Lead
from scoring.results import Change


def per_million(price_per_hour: float, tokens_per_s: float) -> float | None:
    """Compute the cost of a million output tokens, price / (3600 · rate) · 10⁶, in the price's currency.

    Args:
        price_per_hour: the price of all the hardware that the rate was measured on.
        tokens_per_s: output tokens per second; without a rate (0, or not finite) there is no cost.

    Raises:
        ValueError: the price is not a positive number.
    """
    if not 0 < price_per_hour < math.inf:
        raise ValueError(f"a price of {price_per_hour} per hour")
    return price_per_hour / 3600 / tokens_per_s * 1e6 if 0 < tokens_per_s < math.inf else None


def cost_change(before: Sequence[float], after: Sequence[float]) -> Change:
    """Compute the change of the cost of a request if the same GPUs serve in another way: what an hour of a GPU costs is
    the same, so it is the inverse of the ratio of the rates per GPU.

    The interval is Student's t of the difference of the mean logarithms, with one variance for the starts of both ways
    of serving; None where each was started once, which does not show the noise of a start.

    Args:
        before: requests or tokens per second and GPU after each start; positive.
        after: the same with the other way of serving; its starts are not paired with the first ones.
    """
    logs = [[math.log(rate) for rate in rates] for rates in (before, after)]
    degrees = sum(len(log) - 1 for log in logs)
    squares = sum((value - fmean(log)) ** 2 for log in logs for value in log)
    variance = squares / degrees * sum(1 / len(log) for log in logs) if degrees else math.nan
    change = Lead(fmean(logs[0]) - fmean(logs[1]), variance, 0.0, degrees)
    low, high = change.interval() or (None, None)
    return Change(
        value=math.expm1(change.value),
        low=None if low is None else math.expm1(low),
        high=None if high is None else math.expm1(high),
    )
