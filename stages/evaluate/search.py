"""The search for the highest rate that a server holds: rates further and further apart until one holds and one does
not, then bisection between them.

All rates lie on a scale that is the same for all variants after their starts of the same number: servers that differ by
nothing are tried at the same rates. From start to start the scale is shifted, so that where its rates lie averages out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stages.parts.samples.capacity import Tried, bracket

CLOSE: Final = 1.1
"""The ratio of neighbouring rates on the scale, where the search ends; the capacity is interpolated between them."""
SHIFT: Final = (math.sqrt(5) - 1) / 2
"""The share of a step by which the scale is shifted: the golden ratio spreads any number of starts evenly."""
LARGEST_STEPS: Final = 14
"""Almost four times the rate."""
OWN_STEPS: Final = 1
"""The first distance, around what was found at an earlier start of the same variant."""
OTHER_STEPS: Final = 3
"""Around the reference's capacity."""
FIRST_STEPS: Final = 7
"""Where nothing is known but the rate with some requests in flight: almost twice the rate."""


@dataclass(frozen=True)
class Search:
    """Where to begin on the scale of a start, and the distance of the first two rates, which doubles each time."""

    start: int
    begin: int
    steps: int

    @classmethod
    def around(cls, expected_per_s: float, steps: int, start: int = 0) -> Search:
        """A search whose first two rates enclose the expected one."""
        return cls(start, math.floor(_place(expected_per_s, start) - (steps - 1) / 2), steps)

    @classmethod
    def after(cls, sent_per_s: float, start: int = 0) -> Search:
        """A search that begins near a rate about which nothing else is known."""
        return cls(start, round(_place(sent_per_s, start)), FIRST_STEPS)

    def following(self, given: Sequence[Tried]) -> float | None:
        """The next rate to try in requests/s; None once the bracket is close."""
        place = self._next(given)
        return None if place is None else math.pow(CLOSE, place + _shift(self.start))

    def _next(self, given: Sequence[Tried]) -> int | None:
        if not given:
            return self.begin
        low, high = (None if each is None else self._place_of(each) for each in bracket(given))
        if low is not None and high is not None:
            return (low + high) // 2 if high > low + 1 else None
        steps = min(self.steps << min(len(given) - 1, LARGEST_STEPS), LARGEST_STEPS)
        return self._place_of(given[-1]) - steps if low is None else low + steps

    def _place_of(self, tried: Tried) -> int:
        return round(_place(tried.rate_per_s, self.start))


def _place(rate_per_s: float, start: int) -> float:
    return math.log(rate_per_s) / math.log(CLOSE) - _shift(start)


def _shift(start: int) -> float:
    return start * SHIFT % 1.0
