"""What is known of the variants' scores and differences: estimates, and how far chance may have moved them.

The variance of a difference has a part that further starts of the server reduce, and one that only further items of the
quality tasks reduce.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

import numpy as np

from scoring.anchored import SIGNS, log_margins, log_ratios, ranked, scaled, scores, shares_of, spans
from scoring.arrays import Floats
from scoring.criteria import Criteria
from scoring.lead import Lead
from scoring.losses import Quality
from scoring.metrics import METRICS
from scoring.starts import Effects

Shown = Literal["pass", "fail", "unclear"]
"""pass: it is shown that a limit is kept. fail: that it is not. unclear: too few data to tell."""
NAMES: Final = tuple(METRICS)
SPEED: Final = [NAMES.index("latency"), NAMES.index("throughput")]
QUALITY: Final = NAMES.index("quality")
EACH: Final = list(range(len(NAMES)))
"""All metrics by their numbers."""
DRAWS: Final = 2000
"""This determines a probability of 0.9 to ±0.013 (95 %)."""


@dataclass(frozen=True)
class Evidence:
    """What was measured of every variant, in the order of ``variants``."""

    variants: tuple[str, ...]
    quality: Quality
    speed: Effects
    """Effects on ln milliseconds and on ln tokens/s."""
    memory: Floats
    """Bytes, shape (variants,)."""
    asked: str = ""
    """The reference, if it was asked the questions only, because it does not fit where the variants are loaded. Its
    quality is the last row of ``quality``; the first variant's speed and memory stand in for its own."""
    standing: Mapping[str, Shown] = field(default_factory=dict)
    """Whether each variant passes the gates against what is in production; empty if that is not among them."""

    @property
    def anchor(self) -> str:
        """Return the variant that stands in for the reference; empty if that was loaded."""
        return self.variants[0] if self.asked else ""


class Estimate:
    """The metrics of the variants as log-ratios to the reference, with their noise."""

    def __init__(self, evidence: Evidence, criteria: Criteria) -> None:
        """Estimate the metrics and scores. Raise ValueError if the reference is a variant that was not measured."""
        self.evidence, self.criteria = evidence, criteria
        speed = np.exp(evidence.speed.means)
        loaded, asked = np.column_stack([speed, evidence.memory]), evidence.quality.logs[len(evidence.variants) :]
        loaded = np.vstack([loaded, loaded[: len(asked)]])
        self.values: Floats = np.column_stack([np.exp(evidence.quality.logs), loaded])
        """The metrics in their units, shape (variants, metrics); a reference that was asked only is the last row."""
        self.reference: list[int] | None = None
        """The row that each metric is compared with."""
        if isinstance(criteria.reference, str):
            if criteria.reference == evidence.asked:
                self.reference = [len(evidence.variants) if metric == QUALITY else 0 for metric in EACH]
            elif criteria.reference in evidence.variants:
                self.reference = [evidence.variants.index(criteria.reference)] * len(NAMES)
            else:
                raise ValueError(f"the reference {criteria.reference!r} was not measured: name values in its place")
            self.against = self.values[self.reference, EACH]
        else:
            self.against = np.array([getattr(criteria.reference, name) for name in NAMES])
        self.ratios = log_ratios(self.values, self.against)
        self.at = scaled(self.ratios, criteria.anchors)
        """Where the metrics lie between their anchors, 0 to 1."""
        self.scores, self.sums = scores(self.ratios, criteria)

    def order(self, able: Collection[str]) -> list[str]:
        """Order the variants of *able*, the best first; equal ones by name."""
        names = sorted(able)
        places = [self.place(name) for name in names]
        return [names[position] for position in ranked(self.ratios[places], self.criteria)]

    def place(self, name: str) -> int:
        return self.evidence.variants.index(name)

    def lead(self, first: int, second: int) -> Lead:
        """Estimate the difference of two scores, by the delta method.

        A metric beyond its anchor has no influence on a score, unless only chance may have taken it there and the truth
        would speak against the lead: the first's beyond its best anchor, or the second's beyond its worst. Equal scores
        are compared by their sums without clipping, in which every metric counts.
        """
        value = float(self.scores[first] - self.scores[second])
        if value == 0:
            return self._of_scores(float(self.sums[first] - self.sums[second]), {first: 1.0, second: -1.0})
        if self.evidence.speed.degrees < 1:
            return self._of_scores(value, {first: 1.0, second: -1.0})
        of_first = self._within_anchors[first] * (self.at[first] > 0)
        of_second = self._within_anchors[second] * (self.at[second] < 1)
        return self._of_scores(value, {first: of_first, second: -of_second})

    def score(self, place: int) -> Lead:
        return self._of_scores(float(self.scores[place]), {place: self._within_anchors[place]})

    def figure(self, place: int, metric: int) -> Lead:
        """Estimate ln of a metric of a variant in its unit."""
        return self._of_metric(math.log(self.values[place, metric]), {place: 1.0}, metric)

    def ratio(self, place: int, metric: int) -> Lead:
        """Estimate ln of how many times better a metric of a variant is than the reference's."""
        signs = {place: 1.0}
        if self.reference is not None:
            row = self.reference[metric]
            signs[row] = signs.get(row, 0.0) - 1.0
        return self._of_metric(float(self.ratios[place, metric]), signs, metric)

    def differences(self, first: int, second: int) -> dict[str, tuple[float, Lead]]:
        """Estimate the difference of every metric that has a weight; each with its margin."""
        margins, shares = log_margins(self.criteria.margins), shares_of(self.criteria)
        apart, signs = self.ratios[first] - self.ratios[second], {first: 1.0, second: -1.0}
        return {
            NAMES[metric]: (float(margins[metric]), self._of_metric(float(apart[metric]), signs, metric))
            for metric in np.flatnonzero(shares).tolist()
        }

    @cached_property
    def _within_anchors(self) -> Floats:
        """How surely a metric lies between its anchors, shape (variants, metrics): 1 if it was measured there; the
        two-sided probability of a speed to be as far beyond one by chance; 0 for the others, whose noise is known."""
        low, high = spans(self.criteria.anchors)
        within = ((self.at > 0) & (self.at < 1)).astype(float)
        for place, metric in np.argwhere(within == 0).tolist():
            if metric in SPEED:
                ratio = self.ratio(place, metric)
                tail = 1 - ratio.below(low[metric]) if self.at[place, metric] <= 0 else ratio.below(high[metric])
                within[place, metric] = min(1.0, 2 * tail)
        return within

    def _of_scores(self, value: float, influence: dict[int, float | Floats]) -> Lead:
        """Estimate a sum of scores. *influence*: of each variant, as a factor of the weights of all metrics, or of
        each: shape (metrics,)."""
        low, high = spans(self.criteria.anchors)
        slopes = shares_of(self.criteria) / (high - low)
        gradient = np.zeros_like(self.ratios)
        for place, factors in influence.items():
            gradient[place] += factors * slopes
            if self.reference is not None:
                gradient[self.reference, EACH] -= factors * slopes
        return self._lead(value, gradient)

    def _of_metric(self, value: float, signs: dict[int, float], metric: int) -> Lead:
        """Estimate a sum of the logarithms of one metric, in which each variant has a sign."""
        gradient = np.zeros_like(self.ratios)
        for place, sign in signs.items():
            gradient[place, metric] = sign
        return self._lead(value, gradient)

    def _lead(self, value: float, gradient: Floats) -> Lead:
        """Estimate by the *gradient* of the value by the logarithms of all metrics, shape (variants, metrics)."""
        by_starts = self.evidence.speed.spread(gradient[: len(self.evidence.variants), SPEED] * SIGNS[SPEED])
        by_quality = gradient[:, QUALITY]
        by_items = float(by_quality @ self.evidence.quality.covariance @ by_quality)
        return Lead(value, by_starts.variance, by_items, by_starts.degrees)


def chances(estimate: Estimate, names: Sequence[str], *, draws: int = DRAWS) -> dict[str, float]:
    """Compute the probability of each variant to be truly the best, by draws from the posterior of a flat prior.

    There is none if the noise of starts is not known.
    """
    speed, quality = estimate.evidence.speed, estimate.evidence.quality
    if speed.degrees < 1:
        return {}
    generator = np.random.default_rng([0, *b"chances"])
    drawn = np.repeat(estimate.ratios[None], draws, axis=0)
    values, vectors = np.linalg.eigh(quality.covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T  # symmetric
    drawn[..., QUALITY] += generator.standard_normal((draws, len(estimate.ratios))) @ root
    # Every block moves all variants by what it showed of each, so that a difference has the noise of its own pair.
    few = np.sqrt(speed.degrees / generator.chisquare(speed.degrees, draws))
    moved = np.einsum("db,bvm->dvm", generator.standard_normal((draws, speed.blocks)), speed.influences)
    drawn[:, : len(estimate.evidence.variants), SPEED] += SIGNS[SPEED] * few[:, None, None] * moved
    if estimate.reference is not None:
        drawn -= drawn[:, estimate.reference, EACH][:, None]
    places = [estimate.place(name) for name in names]
    best = ranked(drawn[:, places], estimate.criteria)[:, 0]
    return {name: float((best == number).mean()) for number, name in enumerate(names)}
