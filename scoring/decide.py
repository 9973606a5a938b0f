"""The decision: a choice that would be made again tomorrow.

1. Out is who lacks a metric or breaks a constraint. Only the others set the scale (and fp16, for ``relative``).
2. They are ranked by score, with the noise taken out of every metric (``scoring.normalize``).
3. The ranking is made again from every draw, among those who keep the constraints in it, be they out now or not; where
   nobody does, nobody wins. Does its first win in at least ``decision.confidence`` of them, it is *separated*, and it
   is the winner.
4. Otherwise the *contenders* are the likeliest winners that hold that probability together, and whoever ranks among
   them. Out of the choice is whose quality is below another contender's by more than the noise: quality that was lost
   is the one thing that a user can't buy back. Of the others the winner is the best by what would be measured the same
   again, quality and memory, weighed as in the profile. Speed has had its say when it did not separate them: a
   repeated measurement moves it, and with it would move the choice.

A variant that is at least as good in every metric as another, and better in one, never loses to it: every step
keeps their order, whatever the noise and the draws.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from scoring.confidence import intervals, joint, noise_of, score_draws, win_probabilities
from scoring.draws import Draws
from scoring.eligible import Values, drawn_values, exclusions, near_limits, qualifying, unusable, values_of
from scoring.metrics import METRICS, odds
from scoring.normalize import REFERENCE, preferred, reference_of
from scoring.profile import Profile
from scoring.score import DIGITS, rank
from scoring.sensitivity import shares_anywhere, shares_near

EXACT: Final = frozenset({"memory"})
"""Counted, not sampled: it has no noise."""
FRAGILE: Final = 0.9
"""Below this share of the weightings near the profile's, the verdict tells that the choice hangs on the weights."""
STEADY: Final = ("quality", "memory")
"""What a repeated measurement finds again: the same questions are asked, and the same bytes counted."""


@dataclass(frozen=True)
class Margin:
    """By how much the winner's score exceeds that of the best of the others; negative where it ranks behind."""

    over: str
    value: float
    low: float
    high: float
    """95 % interval, from the same draws of both."""


@dataclass(frozen=True)
class Decision:
    """Who was chosen and why. Where nobody can be, the winner is None and all but the exclusions is empty."""

    winner: str | None
    separated: bool
    """Whether the first of the ranking wins in enough of the draws."""
    verdict: str
    ranking: pd.DataFrame
    """The eligible variants, best score first: normalized metrics and ``score``."""
    excluded: dict[str, tuple[str, ...]]
    """Why each of the others can't be chosen, every reason with its numbers."""
    margin: Margin | None
    """None where nobody else can be chosen."""
    win_probability: dict[str, float]
    """By variant that can be chosen; the sum is below 1 where others might win, or nobody."""
    score_interval: dict[str, tuple[float, float]]
    """95 %, among those that can be chosen now."""
    noise: dict[str, float]
    """By metric, in its unit: the largest difference between two variants that chance explains. Without those that do
    not compare."""
    near_limits: tuple[str, ...]
    """Sentences: where one of the contenders, or one who is out, might be on the other side of a limit."""
    near_weights: dict[str, float]
    """By variant, the share of weightings near the profile's that put it first (``scoring.sensitivity``)."""
    any_weights: dict[str, float]
    """The same over all weightings."""

    @property
    def eligible(self) -> tuple[str, ...]:
        """Who could be chosen, best score first."""
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
        samples: bootstrap draws of the same statistics as in *raw*, and of what is constrained by its name in
            ``MEASURES`` (``scoring.draws``); what has none is exact.
        constraint_values: by variant, what ``Constraints`` can limit; ``values_of`` fills what is not given.
        digests: of each variant's files. Those of one digest are one and the same, so no measurement can separate them.
        incomparable: metrics that were not measured alike, so that no difference of theirs counts.

    Raises:
        ValueError: *samples* have not the same number of draws everywhere.
    """
    raw = raw.reindex(columns=list(METRICS)).astype(float).sort_index()
    samples, shares, limits = samples or {}, profile.weights.shares(), profile.constraints.limits()
    values = values_of(raw, constraint_values or {}, reference)
    excluded = exclusions(raw, profile.constraints, samples, values)
    able = raw.drop(index=[name for name in excluded if unusable(raw, samples, name)])
    anchor = reference_of(able, reference)
    out = [name for name in excluded if not (profile.normalization == "relative" and name == anchor)]
    compared = raw.drop(index=out)
    noise = noise_of(compared, samples) | dict.fromkeys(incomparable, math.inf)
    how = (shares, profile.normalization, noise, anchor or reference)
    ranking = rank(compared, *how)
    ranking = ranking.drop(index=[name for name in excluded if name in ranking.index])
    if ranking.empty:
        return _nobody(ranking, excluded)
    drawn = drawn_values(raw, samples, reference)
    kept = qualifying(list(map(str, able.index)), limits, values, drawn, len(joint(able, samples)))
    among = kept.assign(**{str(anchor): True}) if profile.normalization == "relative" else kept
    again = win_probabilities(score_draws(able, samples, *how, among=among), kept)
    chances = {name: again[name] for name in map(str, ranking.index)}
    contenders = with_twins(contenders_of(chances, profile.decision.confidence), list(chances), digests or {})
    winner = steadiest(contenders, compared, ranking, shares, noise["quality"])
    separated = len(contenders) == 1 and chances[winner] >= profile.decision.confidence
    scores = score_draws(compared, samples, *how)[list(ranking.index)]
    near = shares_near(ranking, shares)
    why = preference(winner, contenders, compared, noise)
    on_edge = [*contenders, *(name for name in excluded if name in kept and kept[name].any())]
    return Decision(
        winner=winner,
        separated=separated,
        verdict=in_words(winner, contenders, chances, separated, _without_noise(ranking, profile, samples), near, why),
        ranking=ranking,
        excluded=excluded,
        margin=margin_of(winner, ranking, scores),
        win_probability=chances,
        score_interval=intervals(scores),
        noise={metric: each for metric, each in noise.items() if math.isfinite(each)},
        near_limits=tuple(near_limits(on_edge, limits, values, drawn)),
        near_weights=near,
        any_weights=shares_anywhere(ranking),
    )


def margin_of(winner: str, ranking: pd.DataFrame, scores: pd.DataFrame) -> Margin | None:
    """*winner* against the first of the others in the ranking.

    Args:
        scores: of the variants (columns) in each draw (rows).
    """
    other = next((name for name in map(str, ranking.index) if name != winner), None)
    if other is None:
        return None
    value = float(ranking["score"][winner] - ranking["score"][other])
    low, high = (float(each) for each in np.percentile(scores[winner] - scores[other], [2.5, 97.5]))
    return Margin(other, value, min(low, value), max(high, value))


def contenders_of(chances: Mapping[str, float], confidence: float) -> tuple[str, ...]:
    """The first alone if it holds *confidence*; else down to the lowest-ranked of the likeliest that do together. What
    nobody of them wins is held by none, and left out.

    Args:
        chances: the probability to win, in the ranking's order.
    """
    ranked = list(chances)
    confidence *= min(1.0, sum(chances.values()))
    if chances[ranked[0]] >= confidence:
        return (ranked[0],)
    likeliest = sorted(ranked, key=lambda name: -chances[name])
    held = np.cumsum([chances[name] for name in likeliest])
    enough = likeliest[min(int((held < confidence).sum()), len(likeliest) - 1)]
    # Who is as likely as the last of them is in as well: names must not decide.
    last = max(ranked.index(name) for name in ranked if chances[name] >= chances[enough])
    return tuple(ranked[: max(last, 1) + 1])


def with_twins(contenders: Sequence[str], ranked: Sequence[str], digests: Mapping[str, str]) -> tuple[str, ...]:
    """The contenders, down to the last that is the same as one of them, file by file."""
    theirs = {digests[name] for name in contenders if name in digests}
    last = max(place for place, name in enumerate(ranked) if name in contenders or digests.get(name) in theirs)
    return tuple(ranked[: last + 1])


def steadiest(
    contenders: Sequence[str], raw: pd.DataFrame, ranking: pd.DataFrame, shares: Mapping[str, float], noise: float
) -> str:
    """Of those whose quality is not below another contender's by more than *noise* (of quality), the best by quality
    and memory alone; level ones by ``scoring.normalize.PREFERENCE``.

    Args:
        ranking: normalized metrics.
        shares: the weights.
    """
    quality = raw.loc[list(contenders), "quality"]
    sound = [str(name) for name in preferred(raw.loc[list(contenders)]).index if quality[name] >= quality.max() - noise]
    steady = sum(shares[metric] * ranking.loc[sound, metric] for metric in STEADY)
    return str(pd.Series(steady, index=sound).round(DIGITS).idxmax())


def preference(winner: str, contenders: Sequence[str], raw: pd.DataFrame, noise: Mapping[str, float]) -> str:
    """Why *winner* is preferred among the contenders."""
    if winner == contenders[0]:
        return "it is first in the ranking, and none of them has a higher quality beyond noise."
    before = contenders[: list(contenders).index(winner)]
    if all(raw["quality"][winner] > raw["quality"][name] + noise["quality"] for name in before):
        return "its quality is higher beyond noise than that of those who rank before it."
    return "it is the best of them by what a repeated measurement would not move, quality and memory."


def in_words(
    winner: str,
    contenders: Sequence[str],
    chances: Mapping[str, float],
    separated: bool,
    unknown: Sequence[str],
    near: Mapping[str, float],
    why_preferred: str,
) -> str:
    """The decision in a few sentences that agree with its numbers."""
    edge = "." if separated else ": the evidence does not tell who keeps the constraints."
    if len(chances) == 1:
        again = "" if separated else f", with a probability of {odds(chances[winner])} to be chosen again"
        return f"{winner} is the only variant that can be chosen{again}{edge}"
    if len(contenders) == 1:
        said = f"{winner} has the highest score, with a probability of {odds(chances[winner])} to have it again{edge}"
    else:
        listed = _listed([f"{name} ({odds(chances[name])})" for name in contenders])
        said = f"{listed} could each score highest: the evidence does not separate them. {winner} is preferred: "
        said += why_preferred
    if unknown:
        said += f" The noise of {_listed(unknown)} was not measured, so differences are taken as they are."
    if len(contenders) == 1 and near[winner] < FRAGILE:
        said += f" It hangs on the weights: among weightings near the profile's it is first under {near[winner]:.0%}."
    return said


def _nobody(ranking: pd.DataFrame, excluded: dict[str, tuple[str, ...]]) -> Decision:
    why = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in excluded.items())
    verdict = "No variant can be chosen" + (f": {why}." if why else ": there is none.")
    return Decision(None, False, verdict, ranking, excluded, None, {}, {}, {}, (), {}, {})


def _without_noise(ranking: pd.DataFrame, profile: Profile, samples: Draws) -> tuple[str, ...]:
    weighted = [name for name, share in profile.weights.shares().items() if share and name not in EXACT]
    return tuple(
        metric for metric in weighted if any(metric not in samples.get(name, {}) for name in map(str, ranking.index))
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
