"""Whether a canary is worse than the stable release, judged by slices of time in which both served.

Requests are not independent: those of a burst, of a client, of a moment in which the machine was busy are slow or fail
together. Slices of several seconds are the unit, and what is left of their dependence is estimated and counted. The
verdict is *pass*, *fail*, or *unclear* if the slices can't tell yet. Unclear does not count as a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from scoring.student import quantile, upper_tail, welch

Verdict = Literal["pass", "fail", "unclear"]
SUSPICIOUS: Final = 0.25
"""The p-value below which more failures than those of the stable release are unclear, so more requests are needed."""
CONFIDENCE: Final = 0.6
"""With this probability, one-sided, a latency that passes is within its limit."""
FIRST_LOOK: Final = 2
"""The least number of slices from which a canary can fail."""
LATER: Final = 1.1
"""Each look at the slices comes when there are that many times as many as at the one before."""
EVENNESS: Final = 8
"""Decides how evenly the error rate is shared among the looks: the eighth gets half as much as the first."""
MOST_CORRELATION: Final = 0.75
BLOCKS: Final = 6
"""Fewer blocks of slices don't show whether failures come together."""
MOST_TIMES_LONGER: Final = 1000.0
"""The square root of how many times as long an observation may have to be; beyond, no time would tell."""


def level(error_rate: float, tests: int, window: int, slices: int) -> float:
    """Choose the p-value below which one test fails at one look, so that all looks at all tests of a good canary fail
    with at most the probability *error_rate*: the levels of all of them add up to it, whatever their dependence.

    Args:
        tests: all of a rollout: its checks in each of its steps.
        window: how often the observation of this step began anew, from 1.
        slices: how many have ended in this window. At most of these numbers, nothing may fail.
    """
    look, due = 1, FIRST_LOOK
    while due < slices:
        look, due = look + 1, max(due + 1, math.floor(due * LATER))
    if due != slices:
        return 0.0
    share = EVENNESS / ((look + EVENNESS - 1) * (look + EVENNESS))  # these add up to 1, and so do the next
    return error_rate / tests * share / (window * (window + 1))


@dataclass(frozen=True)
class Mean:
    """The mean of slices, and how far it may be from the truth."""

    value: float
    error: float
    """Standard error, infinite if it can't be estimated."""
    degrees: float
    """Degrees of freedom of the error."""

    def plus(self, other: Mean, factor: float) -> Mean:
        """Add *factor* times another, independent mean (Welch 1947)."""
        value, error = self.value + factor * other.value, math.hypot(self.error, factor * other.error)
        if not error or not math.isfinite(error):
            return Mean(value, error, min(self.degrees, other.degrees))
        degrees = welch((self.error**2, self.degrees), ((factor * other.error) ** 2, other.degrees))
        return Mean(value, error, degrees)

    def times(self, factor: float) -> Mean:
        return Mean(factor * self.value, abs(factor) * self.error, self.degrees)


def mean_of(values: Sequence[float], *, independent: bool = False) -> Mean:
    """Average consecutive slices, as a first-order autoregression: neighbours that are alike tell less than independent
    ones (Bartlett 1946). The correlation is estimated without bias (Marriott & Pope 1954), at least 0. *independent*:
    neither estimate nor count a correlation."""
    n = len(values)
    if n < 2:
        return Mean(values[0] if values else math.nan, math.inf, 0.0)
    mean = math.fsum(values) / n
    apart = [value - mean for value in values]
    squares = math.fsum(value * value for value in apart)
    raw = math.fsum(a * b for a, b in pairwise(apart)) / squares if squares else 0.0
    correlation = 0.0 if independent else min(MOST_CORRELATION, max(0.0, raw + (1 + 3 * raw) / n))
    worth = n * (1 - correlation) / (1 + correlation)
    degrees = n * (1 - correlation**2) / (1 + correlation**2) - 1
    if worth <= 1 or degrees <= 0:
        return Mean(mean, math.inf, 0.0)
    variance = squares / n / (1 - 1 / worth)
    return Mean(mean, math.sqrt(variance / worth), degrees)


def at_most(mean: Mean, limit: float, level: float, confidence: float = CONFIDENCE) -> Verdict:
    """Judge whether the truth behind *mean* is at most *limit*: *fail* if it is shown to be above it at *level*, *pass*
    if it is below with the probability *confidence*."""
    if not mean.degrees > 0 or not math.isfinite(mean.value - limit):
        return "unclear"
    if not mean.error:
        return "pass" if mean.value <= limit else "fail" if level else "unclear"
    if upper_tail((mean.value - limit) / mean.error, mean.degrees) < level:
        return "fail"
    return "pass" if mean.value + mean.error * quantile(confidence, mean.degrees) <= limit else "unclear"


def times_longer(mean: Mean, limit: float, level: float) -> float:
    """Estimate how many times as long an observation would probably tell on which side of *limit* the truth is."""
    reach = mean.error * quantile(CONFIDENCE if mean.value < limit else 1 - level, mean.degrees)
    distance = abs(mean.value - limit)
    return max(1.0, (reach / distance) ** 2) if reach < MOST_TIMES_LONGER * distance else math.inf


@dataclass(frozen=True)
class Counts:
    """*count* of *total* requests, slice by slice."""

    slices: tuple[tuple[float, float], ...]

    @property
    def count(self) -> int:
        return round(math.fsum(count for count, _ in self.slices))

    @property
    def total(self) -> int:
        return round(math.fsum(total for _, total in self.slices))

    @property
    def share(self) -> float | None:
        return self.count / self.total if self.total else None

    @property
    def design_effect(self) -> float:
        """How many times as large the variance of the share is as if the requests were independent, at least 1. Of
        slices, and of two and four in a row taken together, if there are enough of these, the largest counts."""
        return max(self._design_effect(size) for size in (1, 2, 4) if size == 1 or len(self.slices) >= size * BLOCKS)

    def _design_effect(self, size: int) -> float:
        blocks = [self.slices[start : start + size] for start in range(0, len(self.slices), size)]
        sums = [(sum(count for count, _ in block), sum(total for _, total in block)) for block in blocks]
        sums = [(count, of) for count, of in sums if of > 0]
        total = sum(of for _, of in sums)
        share = sum(count for count, _ in sums) / total if total else 0.0
        if not 0 < share < 1 or len(sums) < 2:
            return 1.0
        squares = sum((count - share * of) ** 2 for count, of in sums) * len(sums) / (len(sums) - 1)
        by_chance = math.sqrt(2 / (len(sums) - 1))  # the standard deviation of the effect if it is 1
        return max(1.0, squares / (total * share * (1 - share)) - by_chance)

    def __str__(self) -> str:
        return f"{self.count} of {self.total}"


def failures(canary: Counts, stable: Counts, *, slack: float, level: float) -> Verdict:
    """Judge whether requests of the canary fail more often, by more than *slack* (a difference of shares, 0–1) and
    beyond chance. A difference that chance explains passes, because otherwise a release that fails occasionally could
    never be replaced."""
    if canary.share is None or stable.share is None:
        return "unclear"
    if canary.share - stable.share <= slack:
        return "pass"
    by_chance = chance(canary, stable)
    return "fail" if by_chance < level else "unclear" if by_chance < SUSPICIOUS else "pass"


def chance(canary: Counts, stable: Counts) -> float:
    """Compute the probability that the canary has as many failures as it has, or more, if both fail equally often.

    By Fisher's exact test of as many independent requests as the slices are worth (Rao & Scott 1992, Biometrics 48,
    577–585): a burst of failures counts about as one. A release without failures does not show whether it would have
    them in bursts, so the larger design effect is that of both.
    """
    effect = max(canary.design_effect, stable.design_effect)
    (failed, of), (reference_failed, reference_of) = (
        (round(counts.count / effect), max(1, round(counts.total / effect))) for counts in (canary, stable)
    )
    return increase(failed, of, reference_failed, reference_of)


def increase(failed: int, of: int, reference_failed: int, reference_of: int) -> float:
    """Compute the p-value of Fisher's exact test, one-sided: the probability of *failed* or more failures among *of*
    requests, if both releases fail equally often. 1 if there were no requests."""
    from scipy.stats import hypergeom

    if not of or not reference_of or not failed:
        return 1.0
    return float(hypergeom.sf(failed - 1, of + reference_of, failed + reference_failed, of))
