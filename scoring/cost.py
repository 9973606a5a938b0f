"""The cost of output tokens, from the hourly price of the hardware and the rate at which it generates them."""

from __future__ import annotations

import math


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
