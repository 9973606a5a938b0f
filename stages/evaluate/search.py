"""The search for the highest rate that a server holds: rates further and further apart until one holds and one does
not, then the rate closest to the capacity as far as it is known, until the two are close and the failure is confirmed.

All rates lie on a scale that is the same for all variants after their starts of the same number: servers that differ by
nothing are tried at the same rates. From start to start the scale is shifted, so that where its rates lie averages out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from stages.parts.samples.capacity import LARGEST, Tried, bracket, capacity_per_s

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
CONFIRMING_STEPS: Final = 2
"""Another failure confirms one if its rate is at most this far above."""


@dataclass(frozen=True)
class Search:
    """Where to begin on the scale of a start, and the distance of the first two rates, which doubles each time."""

    start: int
    begin: int
    steps: int
    expected: float = math.inf
    """Where earlier starts of the same variant had their capacity; infinite if unknown."""

    @classmethod
    def around(cls, expected_per_s: float, steps: int, start: int = 0) -> Search:
        """Make a search whose first two rates enclose the expected one."""
        return cls(start, math.floor(_place(expected_per_s, start) - (steps - 1) / 2), steps)

    @classmethod
    def again(cls, found_per_s: float, start: int) -> Search:
        """Make a search around what was found at earlier starts of the same variant."""
        return replace(cls.around(found_per_s, OWN_STEPS, start), expected=_place(found_per_s, start))

    @classmethod
    def after(cls, sent_per_s: float, start: int = 0) -> Search:
        """Make a search that begins near a rate about which nothing else is known."""
        return cls(start, round(_place(sent_per_s, start)), FIRST_STEPS)

    def following(self, trials: Sequence[Tried], close: int = 1) -> float | None:
        """Choose the next rate to try in requests/s, which may be one that failed; None once the bracket is at most
        *close* steps wide and its failure confirmed."""
        place = self._next(trials, close)
        return None if place is None else math.pow(CLOSE, place + _shift(self.start))

    def _next(self, trials: Sequence[Tried], close: int) -> int | None:
        low, high = bracket(trials)
        rates = len({trial.rate_per_s for trial in trials})
        if high is None:
            return self._place_of(low) + self._distance(low, rates) if low else self.begin
        if low is None:
            repeated = len(trials) == 1 and self._is_doubtful(high, low, trials)
            return self._place_of(high) - (0 if repeated else self._distance(high, rates))
        below, above = self._place_of(low), self._place_of(high)
        if above - below > close:
            capacity = round(_place(capacity_per_s(trials) or low.rate_per_s, self.start))
            return min(max(capacity, below + 1), above - 1)
        return above if self._is_doubtful(high, low, trials) else None

    def _distance(self, last: Tried, rates: int) -> int:
        """Count the steps to the next rate where all held or all failed: upwards not beyond that at which the strain
        would be 1 if it rose only as the rate does."""
        steps = min(self.steps << min(rates - 1, LARGEST_STEPS), LARGEST_STEPS)
        if not 1 / LARGEST < last.strain <= 1:
            return steps
        return max(1, min(steps, math.ceil(-math.log(last.strain) / math.log(CLOSE))))

    def _is_doubtful(self, high: Tried, low: Tried | None, trials: Sequence[Tried]) -> bool:
        """Whether the lowest rate that failed is to be tried again, because a pause of the machine can make any trial
        fail.

        A failure at this rate, or just above it, counts if there are two of them; one is enough where earlier starts
        had their capacity; and one more is needed if the server was far less strained just below.
        """
        place = self._place_of(high)
        jumps = low is not None and high.strain >= LARGEST**2 * low.strain
        required = 1 + (place < self.expected - 1) + jumps
        tries = [trial for trial in trials if self._place_of(trial) == place]
        failures = [self._place_of(trial) for trial in trials if not trial.held]
        confirming = [failure for failure in failures if 0 <= failure - place <= CONFIRMING_STEPS]
        return len(confirming) < required and len(tries) <= required

    def _place_of(self, trial: Tried) -> int:
        return round(_place(trial.rate_per_s, self.start))


def _place(rate_per_s: float, start: int) -> float:
    return math.log(rate_per_s) / math.log(CLOSE) - _shift(start)


def _shift(start: int) -> float:
    return start * SHIFT % 1.0
