"""The decision: a choice that would be made again tomorrow.

1. Out is who lacks a metric or breaks a constraint. Only the others set the scale (and fp16, for ``relative``).
2. They are ranked by score, with the noise taken out of every metric (``scoring.normalize``).
3. The ranking is made again from every draw. Does its first win in at least ``decision.confidence`` of them, it is
   *separated*, and it is the winner.
4. Otherwise the *contenders* are the likeliest winners that hold that probability together, and whoever ranks among
   them. Out of the choice is whose quality is below another contender's by more than the noise: quality that was lost
   is the one thing that a user can't buy back. Of the others the winner is the best by what would be measured the same
   again, quality and memory, weighed as in the profile. Speed has had its say when it did not separate them: a
   repeated measurement moves it, and with it would move the choice.

A variant that is at least as good in every metric as another, and better in one, never loses to it: every step
keeps their order, whatever the noise and the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from scoring.confidence import intervals, noise_of, score_draws, win_probabilities
from scoring.constraints import broken
from scoring.draws import Samples
from scoring.metrics import METRICS, odds
from scoring.normalize import REFERENCE, preferred, reference_of
from scoring.profile import Profile
from scoring.score import DIGITS, rank
from scoring.sensitivity import shares_anywhere, shares_near

EXACT: Final = frozenset({"memory"})
"""Counted, not sampled: it has no noise."""
GIB: Final = 2**30
FRAGILE: Final = 0.9
"""Below this share of the weightings near the profile's, the verdict tells that the choice hangs on the weights."""
STEADY: Final = ("quality", "memory")
"""What a repeated measurement finds again: the same questions are asked, and the same bytes counted."""
Values = Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class Decision:
    """Who was chosen and why. Where nobody can be, the winner is None and all but the exclusions is empty."""

    winner: str | None
    separated: bool
    """Whether the first of the ranking wins in enough of the draws. Of one variant alone: True."""
    verdict: str
    ranking: pd.DataFrame
    """The eligible variants, best score first: normalized metrics and ``score``."""
    excluded: dict[str, tuple[str, ...]]
    """Why each of the others can't be chosen, every reason with its numbers."""
    contenders: tuple[str, ...]
    """Among which the evidence does not decide, in the ranking's order; the winner alone if it is separated."""
    win_probability: dict[str, float]
    score_interval: dict[str, tuple[float, float]]
    """95 %."""
    noise: dict[str, float]
    """By metric, in its unit: the largest difference between two variants that chance explains."""
    noise_unknown: tuple[str, ...]
    """Weighted metrics without draws (memory has no noise): their differences are taken as they are."""
    near_weights: dict[str, float]
    """By variant, the share of weightings near the profile's that put it first (``scoring.sensitivity``)."""
    any_weights: dict[str, float]
    """The same over all weightings."""
    reference: str | None
    """What ``relative`` relates to: fp16, or if it was not measured the variant of the highest quality."""

    @property
    def eligible(self) -> tuple[str, ...]:
        """Who could be chosen, best score first."""
        return tuple(map(str, self.ranking.index))


def decide(
    raw: pd.DataFrame,
    profile: Profile,
    samples: Samples | None = None,
    constraint_values: Values | None = None,
    *,
    digests: Mapping[str, str] | None = None,
    reference: str = REFERENCE,
) -> Decision:
    """Choose one of the variants.

    Args:
        raw: one row per variant, columns ``METRICS`` in their units; NaN or None for what was not measured.
        samples: bootstrap draws of the same statistics as in *raw* (``scoring.draws``); what has none is exact.
        digests: of each variant's files. Those of one digest are one and the same, so no measurement can separate them.
        constraint_values: by variant, what ``Constraints`` can limit; ``known_values`` fills what is not given.

    Raises:
        ValueError: *samples* have not the same number of draws everywhere.
    """
    raw = raw.reindex(columns=list(METRICS)).astype(float).sort_index()
    samples = samples or {}
    excluded = exclusions(raw, profile, samples, constraint_values or {}, reference)
    anchor = reference_of(
        raw.drop(index=[name for name in map(str, raw.index) if _bad_draws(samples, name)]), reference
    )
    out = [name for name in excluded if not (profile.normalization == "relative" and name == anchor)]
    compared = raw.drop(index=out)
    noise = noise_of(compared, samples)
    how = (profile.weights.shares(), profile.normalization, noise, anchor or reference)
    ranking = rank(compared, *how)
    ranking = ranking.drop(index=[name for name in excluded if name in ranking.index])
    if ranking.empty:
        return _nobody(ranking, excluded)
    scores = score_draws(compared, samples, *how)[list(ranking.index)]
    chances = win_probabilities(scores)
    contenders = with_twins(contenders_of(chances, profile.decision.confidence), list(chances), digests or {})
    winner = steadiest(contenders, compared, ranking, profile.weights.shares(), noise["quality"])
    unknown = _without_noise(ranking, profile, samples)
    near = shares_near(ranking, profile.weights.shares())
    return Decision(
        winner=winner,
        separated=len(contenders) == 1,
        verdict=in_words(winner, contenders, chances, unknown, near, preference(winner, contenders, compared, noise)),
        ranking=ranking,
        excluded=excluded,
        contenders=contenders,
        win_probability=chances,
        score_interval=intervals(scores),
        noise=noise,
        noise_unknown=unknown,
        near_weights=near,
        any_weights=shares_anywhere(ranking),
        reference=anchor,
    )


def exclusions(
    raw: pd.DataFrame, profile: Profile, samples: Samples, given: Values, reference: str = REFERENCE
) -> dict[str, tuple[str, ...]]:
    """Who can't be chosen, with every reason."""
    known = known_values(raw, reference)
    found: dict[str, tuple[str, ...]] = {}
    for name in map(str, raw.index):
        missing = [f"{metric} was not measured" for metric in METRICS if not _measured(raw[metric][name])]
        limits = broken({**known[name], **given.get(name, {})}, profile.constraints)
        reasons = (*missing, *_bad_draws(samples, name), *(each.text for each in limits))
        if reasons:
            found[name] = reasons
    return found


def known_values(raw: pd.DataFrame, reference: str = REFERENCE) -> dict[str, dict[str, float | None]]:
    """What follows from the four metrics: ``quality_recovery``, ``e2el_p95_ms`` and ``memory_gib``."""
    best = float(raw["quality"].get(reference, float("nan")))
    return {
        str(name): {
            "quality_recovery": quality / best if best > 0 else None,
            "e2el_p95_ms": latency,
            "memory_gib": memory / GIB,
        }
        for name, quality, latency, memory in raw[["quality", "latency", "memory"]].itertuples(name=None)
    }


def contenders_of(chances: Mapping[str, float], confidence: float) -> tuple[str, ...]:
    """The first alone if it wins with *confidence*; else down to the lowest-ranked of the likeliest that do together.

    Args:
        chances: the probability to win, in the ranking's order.
    """
    ranked = list(chances)
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
    unknown: Sequence[str],
    near: Mapping[str, float],
    why_preferred: str,
) -> str:
    """The decision in a few sentences that agree with its numbers."""
    if len(chances) == 1:
        return f"{winner} is the only variant that can be chosen."
    if len(contenders) == 1:
        said = f"{winner} has the highest score, with a probability of {odds(chances[winner])} to have it again."
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
    return Decision(None, False, verdict, ranking, excluded, (), {}, {}, {}, (), {}, {}, None)


def _measured(value: float) -> bool:
    return 0 <= value < float("inf")


def _bad_draws(samples: Samples, variant: str) -> list[str]:
    """Draws that are no measurements are as bad as a missing metric: they must not pass as a low or high score."""
    given = samples.get(variant, {})
    return [
        f"{metric} has draws that are not finite or negative"
        for metric in METRICS
        if metric in given and not (np.isfinite(given[metric]) & (given[metric] >= 0)).all()
    ]


def _without_noise(ranking: pd.DataFrame, profile: Profile, samples: Samples) -> tuple[str, ...]:
    weighted = [name for name, share in profile.weights.shares().items() if share and name not in EXACT]
    return tuple(
        metric for metric in weighted if any(metric not in samples.get(name, {}) for name in map(str, ranking.index))
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
