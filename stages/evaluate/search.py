"""The search for the highest rate that a server holds: rates further and further apart until one holds and one does
not, then bisection between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stages.parts.samples.capacity import Tried, bracket

CLOSE: Final = 1.1
"""The bracket's ratio at which the search ends; the capacity is interpolated within."""
LARGEST_STEP: Final = 4.0
LARGEST_POWER: Final = 64
OWN_STEP: Final = 1.1
"""The first step around what was found at an earlier start of the same variant."""
OTHER_STEP: Final = 1.4
"""Around the reference's capacity."""
FIRST_STEP: Final = 2.0
"""Where nothing is known but the rate with some requests in flight."""


@dataclass(frozen=True)
class Search:
    """Where to begin, and the ratio of the first two rates, which is squared from step to step."""

    begin_per_s: float
    step: float

    @classmethod
    def around(cls, expected_per_s: float, step: float) -> Search:
        """A search whose first two rates enclose the expected one."""
        return cls(expected_per_s / math.sqrt(step), step)

    def following(self, given: Sequence[Tried]) -> float | None:
        """The next rate to try in requests/s; None once the bracket is close."""
        if not given:
            return self.begin_per_s
        low, high = bracket(given)
        if low and high:
            return math.sqrt(low.rate_per_s * high.rate_per_s) if high.rate_per_s > CLOSE * low.rate_per_s else None
        step = min(math.pow(self.step, min(2 ** (len(given) - 1), LARGEST_POWER)), LARGEST_STEP)
        return low.rate_per_s * step if low else given[-1].rate_per_s / step
