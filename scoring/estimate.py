"""What is known of the variants' scores and differences: estimates, and how far chance may have moved them.

The variance of a difference has a part that further starts of the server reduce, and one that only further items of the
quality tasks reduce.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from scoring.anchored import SIGNS, log_margins, log_ratios, ranked, scaled, scores, shares_of, spans
from scoring.arrays import Floats
from scoring.criteria import Criteria
from scoring.draws import DRAWS, SEED
from scoring.losses import Quality
from scoring.metrics import METRICS
from scoring.starts import Effects
from scoring.student import quantile, upper_tail

NAMES: Final = tuple(METRICS)
SPEED: Final = [NAMES.index("latency"), NAMES.index("throughput")]
QUALITY: Final = NAMES.index("quality")


@dataclass(frozen=True)
class Evidence:
    """What was measured of every variant, in the order of ``variants``."""

    variants: tuple[str, ...]
    quality: Quality
    speed: Effects
    """Effects on ln milliseconds and on ln tokens/s."""
    memory: Floats
    """Bytes, shape (variants,)."""


class Estimate:
    """The metrics of the variants as log-ratios to the reference, with their noise."""

    def __init__(self, evidence: Evidence, criteria: Criteria) -> None:
        """Raises: ValueError: the reference is a variant that was not measured."""
        self.evidence, self.criteria = evidence, criteria
        speed = np.exp(evidence.speed.means)
        self.values: Floats = np.column_stack([np.exp(evidence.quality.logs), speed, evidence.memory])
        """The metrics in their units, shape (variants, metrics)."""
        self.reference: int | None = None
        if isinstance(criteria.reference, str):
            if criteria.reference not in evidence.variants:
                raise ValueError(f"the reference {criteria.reference!r} was not measured: name values in its place")
            self.reference = evidence.variants.index(criteria.reference)
            self.against = self.values[self.reference]
        else:
            self.against = np.array([getattr(criteria.reference, name) for name in NAMES])
        self.ratios = log_ratios(self.values, self.against)
        self.at = scaled(self.ratios, criteria.anchors)
        """Where the metrics lie between their anchors, 0 to 1."""
        self.scores, self.sums = scores(self.ratios, criteria)

    def order(self, able: Collection[str]) -> list[str]:
        """The variants of *able*, the best first; equal ones by name."""
        names = sorted(able)
        places = [self.place(name) for name in names]
        return [names[each] for each in ranked(self.ratios[places], self.criteria)]

    def place(self, name: str) -> int:
        return self.evidence.variants.index(name)

    def lead(self, first: int, second: int) -> Lead:
        """The difference of two scores, by the delta method. A metric beyond its anchor has no influence, unless only
        chance may have taken it there and the truth would speak against the lead."""
        value = float(self.scores[first] - self.scores[second])
        counted = self._between[[first, second]] * [self.at[first] > 0, self.at[second] < 1]
        clipped = value != 0
        if not clipped:
            value = float(self.sums[first] - self.sums[second])
        if not clipped or self.evidence.speed.degrees < 1:
            counted = np.ones_like(counted)
        return self._combined(value, {first: counted[0], second: -counted[1]})

    def score(self, place: int) -> Lead:
        """The score of one variant."""
        return self._combined(float(self.scores[place]), {place: self._between[place]})

    def figure(self, place: int, metric: int) -> Lead:
        """ln of a metric of a variant in its unit."""
        return self._difference(math.log(self.values[place, metric]), np.eye(len(self.values))[place], metric)

    def ratio(self, place: int, metric: int) -> Lead:
        """ln of how many times better a metric of a variant is than the reference's."""
        value = float(self.ratios[place, metric])
        contrast = np.zeros(len(self.ratios))
        contrast[place] += 1.0
        if self.reference is not None:
            contrast[self.reference] -= 1.0
        return self._difference(value, contrast, metric)

    def differences(self, first: int, second: int) -> list[tuple[float, Lead]]:
        """The margin and the difference of every metric that has a weight."""
        margins, shares = log_margins(self.criteria.margins), shares_of(self.criteria)
        contrast = np.zeros(len(self.ratios))
        contrast[first], contrast[second] = 1.0, -1.0
        found = []
        for metric in np.flatnonzero(shares):
            value = float(self.ratios[first, metric] - self.ratios[second, metric])
            found.append((float(margins[metric]), self._difference(value, contrast, int(metric))))
        return found

    @cached_property
    def _between(self) -> Floats:
        """How surely a metric is not beyond its anchors, shape (variants, metrics): 1 between them; the two-sided
        probability of a speed to be as far beyond one by chance; 0 for the others, whose noise is known."""
        low, high = spans(self.criteria.anchors)
        found = ((self.at > 0) & (self.at < 1)).astype(float)
        for place, metric in np.argwhere(found == 0).tolist():
            if metric in SPEED:
                ratio = self.ratio(place, metric)
                tail = 1 - ratio.below(low[metric]) if self.at[place, metric] <= 0 else ratio.below(high[metric])
                found[place, metric] = min(1.0, 2 * tail)
        return found

    def _combined(self, value: float, influence: Mapping[int, Floats]) -> Lead:
        """A sum of scores.

        Args:
            influence: of the metrics of each variant, shape (metrics,), as a factor of their weight.
        """
        low, high = spans(self.criteria.anchors)
        slopes = shares_of(self.criteria) / (high - low)
        gradient = np.zeros_like(self.ratios)
        for place, factors in influence.items():
            gradient[place] += factors * slopes
            if self.reference is not None:
                gradient[self.reference] -= factors * slopes
        return self._lead(value, gradient)

    def _difference(self, value: float, contrast: Floats, metric: int) -> Lead:
        return self._lead(value, np.outer(contrast, np.arange(len(NAMES)) == metric))

    def _lead(self, value: float, gradient: Floats) -> Lead:
        """Args: gradient: of *value* by the logarithms of all metrics, shape (variants, metrics)."""
        by_starts = self.evidence.speed.spread(gradient[:, SPEED] * SIGNS[SPEED])
        by_quality = gradient[:, QUALITY]
        by_items = float(by_quality @ self.evidence.quality.covariance @ by_quality)
        return Lead(value, by_starts.variance, by_items, by_starts.degrees)


@dataclass(frozen=True)
class Lead:
    """An estimated difference, with the variance that the noise of starts and the sampling of items give it."""

    value: float
    by_starts: float
    by_items: float
    degrees: float
    """Degrees of freedom of the noise of starts."""

    @property
    def deviation(self) -> float:
        return math.sqrt(max(0.0, self.by_starts + self.by_items))

    @property
    def share_by_items(self) -> float:
        """The share of the variance that only further items reduce; 0 if the noise is not known, or there is none."""
        known = self.by_starts + self.by_items
        return self.by_items / known if known > 0 else 0.0

    @property
    def joint_degrees(self) -> float:
        """Welch and Satterthwaite's degrees of freedom; the variance by items counts as known."""
        if self.by_starts <= 0:
            return math.inf
        return self.degrees * ((self.by_starts + self.by_items) / self.by_starts) ** 2

    def below(self, bound: float) -> float:
        """The probability that the true difference is below *bound*, 0.5 if the noise is not known.

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

    def reach(self, tail: float) -> float:
        """How far an interval with this probability beyond each end extends from the value."""
        if math.isnan(self.by_starts):
            return math.inf
        by_starts = quantile(1 - tail, self.degrees) * math.sqrt(self.by_starts) if self.by_starts > 0 else 0.0
        return max(by_starts, quantile(1 - tail, self.joint_degrees) * self.deviation if self.deviation else 0.0)

    def with_more(self, starts: float, items: float, degrees: float) -> Lead:
        """With so many times the starts and items."""
        return replace(self, by_starts=self.by_starts / starts, by_items=self.by_items / items, degrees=degrees)


def chances(estimate: Estimate, names: Sequence[str], *, draws: int = DRAWS) -> dict[str, float]:
    """The probability of each variant to be truly the best, by draws from the posterior of a flat prior.

    Empty if the noise of starts is not known.
    """
    speed, quality = estimate.evidence.speed, estimate.evidence.quality
    if speed.degrees < 1:
        return {}
    generator = np.random.default_rng([SEED, *b"chances"])
    drawn = np.repeat(estimate.ratios[None], draws, axis=0)
    drawn[..., QUALITY] += generator.standard_normal((draws, len(estimate.ratios))) @ _root(quality.covariance)
    # Every block moves all variants by what it showed of each, so that a difference has the noise of its own pair.
    few = np.sqrt(speed.degrees / generator.chisquare(speed.degrees, draws))
    moved = np.einsum("db,bvm->dvm", generator.standard_normal((draws, speed.blocks)), speed.influences)
    drawn[..., SPEED] += SIGNS[SPEED] * few[:, None, None] * moved
    if estimate.reference is not None:
        drawn -= drawn[:, [estimate.reference]]
    places = [estimate.place(name) for name in names]
    best = ranked(drawn[:, places], estimate.criteria)[:, 0]
    return {name: float((best == number).mean()) for number, name in enumerate(names)}


def _root(covariance: Floats) -> Floats:
    """The symmetric square root of a covariance matrix."""
    values, vectors = np.linalg.eigh(covariance)
    found: Floats = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    return found
