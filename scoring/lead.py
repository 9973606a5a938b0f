"""An estimate with its noise, which is that of the server's starts and that of the sampled items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from scoring.student import quantile, upper_tail, welch


@dataclass(frozen=True)
class Lead:
    """An estimated difference, with the variance that the noise of starts and the sampling of items give it."""

    value: float
    by_starts: float
    """NaN if it is not known."""
    by_items: float
    degrees: float
    """Degrees of freedom of the noise of starts."""

    @classmethod
    def of_starts(cls, values: Sequence[float]) -> Lead:
        """Estimate the mean from one value per start of the server."""
        repeated = len(values) > 1
        return cls(fmean(values), variance(values) / len(values) if repeated else math.nan, 0.0, len(values) - 1)

    @property
    def deviation(self) -> float:
        return math.sqrt(max(0.0, self.by_starts + self.by_items))

    @property
    def share_by_items(self) -> float:
        """The share of the variance that only further items reduce; 0 if the noise is not known, or there is none."""
        total = self.by_starts + self.by_items
        return self.by_items / total if total > 0 else 0.0

    @property
    def joint_degrees(self) -> float:
        """Degrees of freedom of both together; the variance by items counts as known."""
        return welch((max(0.0, self.by_starts), self.degrees), (self.by_items, math.inf))

    def minus(self, other: Lead) -> Lead:
        """Subtract an estimate from other starts and other items."""
        return Lead(
            self.value - other.value,
            self.by_starts + other.by_starts,
            self.by_items + other.by_items,
            welch((self.by_starts, self.degrees), (other.by_starts, other.degrees)),
        )

    def below(self, bound: float) -> float:
        """Compute the probability that the true difference is below *bound*; 0.5 if the noise is not known.

        Two starts may agree by chance, and their noise then seems to be nothing beside that of the items. So the
        difference has to be beyond the noise of the starts alone, too.
        """
        if math.isnan(self.by_starts):
            return 0.5
        if self.deviation == 0:
            return float(self.value < bound)
        apart = abs(self.value - bound)
        tail = upper_tail(apart / self.deviation, self.joint_degrees)
        if self.by_starts > 0:
            tail = max(tail, upper_tail(apart / math.sqrt(self.by_starts), self.degrees))
        return tail if self.value >= bound else 1 - tail

    def reach(self, tail: float = 0.025) -> float:
        """How far an interval with this probability beyond each end extends from the value."""
        if math.isnan(self.by_starts):
            return math.inf
        by_starts = quantile(1 - tail, self.degrees) * math.sqrt(self.by_starts) if self.by_starts > 0 else 0.0
        return max(by_starts, quantile(1 - tail, self.joint_degrees) * self.deviation if self.deviation else 0.0)

    def interval(self) -> tuple[float, float] | None:
        """Compute the 95 % interval; None if the noise is not known."""
        reach = self.reach()
        return (self.value - reach, self.value + reach) if math.isfinite(reach) else None
