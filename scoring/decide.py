"""The decision: a choice that a repeated measurement would make again.

1. Variants that lack a metric or violate a constraint are excluded. Only the others set the scale (and fp16, for
   ``relative``).
2. The others are ranked by score, after the noise is taken out of every metric (``scoring.normalize``).
3. The ranking is repeated in every bootstrap draw, among the variants that meet the constraints in that draw, whether
   or not they are excluded now; a draw in which no variant meets them has no winner. If the first of the ranking wins
   at least ``decision.confidence`` of the draws, it is *separated* from the others, and it is the winner.
4. Otherwise the *contenders* are the likeliest winners that together reach that probability, and every variant that
   ranks among them. A contender whose quality is below that of another contender by more than the noise cannot be
   chosen: lost quality is the one thing that a user cannot buy back. The winner is the best of the rest by the metrics
   that a repeated measurement would reproduce, quality and memory, weighted as in the profile. Speed has already
   counted and did not separate them; since it moves between measurements, it would also move the choice.

A variant that is at least as good as another in every metric, and better in one, never loses to it: every step keeps
their order, whatever the noise and the draws.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pandas as pd

from scoring.confidence import intervals, joint, noise_of, score_draws, win_probabilities
from scoring.draws import Draws
from scoring.eligible import Limits, Values, drawn_values, exclusions, unusable, values_of
from scoring.metrics import METRICS
from scoring.normalize import REFERENCE, preferred, reference_of
from scoring.profile import Profile
from scoring.score import DIGITS, rank
from scoring.sensitivity import shares_anywhere, shares_near
from scoring.verdict import Ranked, verdict_of

EXACT: Final = frozenset({"memory"})
"""Counted, not sampled: it has no noise."""
REPRODUCED: Final = ("quality", "memory")
"""The metrics that a repeated measurement reproduces: the same questions are asked, and the same bytes counted."""


@dataclass(frozen=True)
class Margin:
    """The winner's score minus that of the best other variant; negative where the winner ranks behind it."""

    over: str
    value: float
    low: float
    high: float
    """95 % interval, from the same draws of both."""


@dataclass(frozen=True)
class Decision:
    """Which variant was chosen and why. If none can be chosen, the winner is None and only ``excluded`` and ``verdict``
    are filled."""

    winner: str | None
    separated: bool
    """Whether the first of the ranking wins enough of the draws."""
    verdict: str
    ranking: pd.DataFrame
    """The eligible variants, best score first: normalized metrics and ``score``."""
    excluded: dict[str, tuple[str, ...]]
    """Why each of the others cannot be chosen: every reason, with its numbers."""
    margin: Margin | None = None
    """None if no other variant can be chosen."""
    win_probability: dict[str, float] = field(default_factory=dict)
    """The probability of each eligible variant; the sum is below 1 if an excluded variant, or none, may win."""
    score_interval: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95 % interval by eligible variant, on the scale of the eligible variants."""
    noise: dict[str, float] = field(default_factory=dict)
    """The largest difference between two variants that chance explains, for each comparable metric in its unit."""
    near_limits: tuple[str, ...] = ()
    """Sentences naming the contenders and excluded variants that may be on the other side of a limit."""
    near_weights: dict[str, float] = field(default_factory=dict)
    """The share of weightings near the profile's that rank each variant first (``scoring.sensitivity``)."""
    any_weights: dict[str, float] = field(default_factory=dict)
    """The same over all weightings."""

    @property
    def eligible(self) -> tuple[str, ...]:
        """The variants that can be chosen, best score first."""
        return tuple(map(str, self.ranking.index))


def decide(
    raw: pd.DataFrame,
    profile: Profile,
    samples: Draws | None = None,
    constraint_values: Values | None = None,
    *,
    digests: Mapping[str, str] | None = None,
    incomparable: Collection[str] = (),
    reference: str = REFERENCE,
) -> Decision:
    """Choose one of the variants.

    Args:
        raw: one row per variant, columns ``METRICS`` in their units; NaN or None for what was not measured.
        samples: bootstrap draws of the same statistics as in *raw*, and of constrained values by their names in
            ``MEASURES`` (``scoring.draws``); what has no draws is exact.
        constraint_values: what ``Constraints`` can limit, by variant; ``values_of`` adds what follows from *raw*.
        digests: the digest of each variant's files. Variants of one digest are identical, so no measurement can
            separate them.
        incomparable: metrics that were not measured under the same conditions, so their differences do not count.

    Raises:
        ValueError: the *samples* have different numbers of draws.
    """
    raw, samples = raw.reindex(columns=list(METRICS)).astype(float).sort_index(), samples or {}
    values = values_of(raw, constraint_values or {}, reference)
    limits = Limits(profile.constraints.limits(), values, drawn_values(raw, samples, reference))
    excluded = exclusions(raw, profile.constraints, samples, values)
    able = raw.drop(index=[name for name in excluded if unusable(raw, samples, name)])
    anchor = reference_of(able, reference)
    out = [name for name in excluded if not (profile.normalization == "relative" and name == anchor)]
    compared = raw.drop(index=out)
    noise = noise_of(compared, samples) | dict.fromkeys(incomparable, math.inf)
    return _choose(
        Contest(profile, samples, limits, excluded, able, compared, noise, anchor or reference), digests or {}
    )


@dataclass(frozen=True)
class Contest:
    """The variants of a decision, and the scale on which they are compared."""

    profile: Profile
    samples: Draws
    limits: Limits
    excluded: dict[str, tuple[str, ...]]
    able: pd.DataFrame
    """Raw metrics of the variants that may win a draw: every metric was measured."""
    compared: pd.DataFrame
    """Raw metrics of the variants that set the scale: the eligible ones, and for ``relative`` the reference."""
    noise: dict[str, float]
    reference: str

    @property
    def shares(self) -> dict[str, float]:
        return self.profile.weights.shares()

    def ranking(self) -> pd.DataFrame:
        """The eligible variants, best first, see ``scoring.score.rank``."""
        found = rank(self.compared, self.shares, self.profile.normalization, self.noise, self.reference)
        return found.drop(index=[name for name in self.excluded if name in found.index])

    def scores(self, eligible: Sequence[str]) -> pd.DataFrame:
        """The scores of the eligible variants (columns) in each draw (rows), on the scale of ``compared``."""
        return self._score_draws(self.compared)[list(eligible)]

    def met(self) -> pd.DataFrame:
        """In which draws (rows) each variant (columns) meets every limit."""
        return self.limits.met(list(map(str, self.able.index)), len(joint(self.able, self.samples)))

    def win_probabilities(self, met: pd.DataFrame) -> dict[str, float]:
        """The share of draws that each variant wins among those that meet every limit in the draw."""
        relative = self.profile.normalization == "relative"
        among = met.assign(**{self.reference: True}) if relative else met
        return win_probabilities(self._score_draws(self.able, among), met)

    def without_noise(self, eligible: Sequence[str]) -> list[str]:
        """The weighted metrics whose noise was not measured for every eligible variant."""
        weighted = [name for name, share in self.shares.items() if share and name not in EXACT]
        return [metric for metric in weighted if any(metric not in self.samples.get(name, {}) for name in eligible)]

    def _score_draws(self, raw: pd.DataFrame, among: pd.DataFrame | None = None) -> pd.DataFrame:
        normalization = self.profile.normalization
        return score_draws(raw, self.samples, self.shares, normalization, self.noise, self.reference, among)


def _choose(contest: Contest, digests: Mapping[str, str]) -> Decision:
    ranking, confidence = contest.ranking(), contest.profile.decision.confidence
    if ranking.empty:
        why = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in contest.excluded.items())
        verdict = "No variant can be chosen" + (f": {why}." if why else ": there is none.")
        return Decision(None, False, verdict, ranking, contest.excluded)
    eligible, met = list(map(str, ranking.index)), contest.met()
    again = contest.win_probabilities(met)
    chances = {name: again[name] for name in eligible}
    contenders = with_twins(contenders_of(chances, confidence), eligible, digests)
    winner = most_reproducible(contenders, contest.compared, ranking, contest.shares, contest.noise["quality"])
    separated = len(contenders) == 1 and chances[winner] >= confidence
    scores, near_weights = contest.scores(eligible), shares_near(ranking, contest.shares)
    quality = {str(name): float(each) for name, each in contest.compared["quality"].items()}
    ranked = Ranked(winner, contenders, chances, separated, near_weights[winner])
    may_return = [name for name in contest.excluded if name in met and met[name].any()]
    return Decision(
        winner=winner,
        separated=separated,
        verdict=verdict_of(ranked, quality, contest.noise["quality"], contest.without_noise(eligible)),
        ranking=ranking,
        excluded=contest.excluded,
        margin=margin_of(winner, ranking, scores),
        win_probability=chances,
        score_interval=intervals(scores),
        noise={metric: each for metric, each in contest.noise.items() if math.isfinite(each)},
        near_limits=tuple(contest.limits.near([*contenders, *may_return])),
        near_weights=near_weights,
        any_weights=shares_anywhere(ranking),
    )


def margin_of(winner: str, ranking: pd.DataFrame, scores: pd.DataFrame) -> Margin | None:
    """The margin of *winner* over the first other variant of the ranking; None if there is no other.

    Args:
        scores: the scores of the variants (columns) in each draw (rows).
    """
    other = next((name for name in map(str, ranking.index) if name != winner), None)
    if other is None:
        return None
    value = float(ranking["score"][winner] - ranking["score"][other])
    low, high = (float(each) for each in np.percentile(scores[winner] - scores[other], [2.5, 97.5]))
    return Margin(other, value, min(low, value), max(high, value))


def contenders_of(chances: Mapping[str, float], confidence: float) -> tuple[str, ...]:
    """The first alone if it reaches *confidence*; otherwise all down to the lowest-ranked of the likeliest winners that
    reach it together. The probability that none of them wins is left out.

    Args:
        chances: the probabilities to win, in the order of the ranking.
    """
    ranked = list(chances)
    confidence *= min(1.0, sum(chances.values()))
    if chances[ranked[0]] >= confidence:
        return (ranked[0],)
    likeliest = sorted(ranked, key=lambda name: -chances[name])
    held = np.cumsum([chances[name] for name in likeliest])
    enough = likeliest[min(int((held < confidence).sum()), len(likeliest) - 1)]
    # A variant that is as likely as the last of them is a contender too: names must not decide.
    last = max(ranked.index(name) for name in ranked if chances[name] >= chances[enough])
    return tuple(ranked[: max(last, 1) + 1])


def with_twins(contenders: Sequence[str], ranked: Sequence[str], digests: Mapping[str, str]) -> tuple[str, ...]:
    """The contenders, down to the last variant that is identical to one of them, file by file."""
    theirs = {digests[name] for name in contenders if name in digests}
    last = max(place for place, name in enumerate(ranked) if name in contenders or digests.get(name) in theirs)
    return tuple(ranked[: last + 1])


def most_reproducible(
    contenders: Sequence[str], raw: pd.DataFrame, ranking: pd.DataFrame, shares: Mapping[str, float], noise: float
) -> str:
    """The best contender by quality and memory alone, without those whose quality is below another contender's by more
    than *noise* (of quality). Ties are broken by ``scoring.normalize.PREFERENCE``.

    Args:
        ranking: the normalized metrics.
        shares: the weights.
    """
    quality = raw.loc[list(contenders), "quality"]
    sound = [str(name) for name in preferred(raw.loc[list(contenders)]).index if quality[name] >= quality.max() - noise]
    steady = sum(shares[metric] * ranking.loc[sound, metric] for metric in REPRODUCED)
    return str(pd.Series(steady, index=sound).round(DIGITS).idxmax())
