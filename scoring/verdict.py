"""A decision in words: sentences that agree with its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scoring.metrics import odds

FRAGILE: Final = 0.9
"""Below this share of the weightings near the profile's, the verdict says that the choice depends on the weights."""


@dataclass(frozen=True)
class Ranked:
    winner: str
    contenders: Sequence[str]
    """In the order of the ranking."""
    chances: Mapping[str, float]
    """The probability to win of every eligible variant, in the order of the ranking."""
    separated: bool
    near_weights: float
    """The share of weightings near the profile's under which the winner is first."""


def verdict_of(ranked: Ranked, quality: Mapping[str, float], noise: float, unknown: Sequence[str]) -> str:
    """Why the winner was chosen.

    Args:
        quality: by variant.
        noise: of quality.
        unknown: the metrics whose noise was not measured.
    """
    winner, chances = ranked.winner, ranked.chances
    again = odds(chances[winner])
    unsure = "" if ranked.separated else ": the evidence does not show which variants meet the constraints"
    if len(chances) == 1:
        likely = "" if ranked.separated else f", with a probability of {again} of being chosen again"
        return f"{winner} is the only variant that can be chosen{likely}{unsure}."
    if len(ranked.contenders) == 1:
        said = f"{winner} has the highest score, with a probability of {again} of having it again{unsure}."
    else:
        listed = _listed([f"{name} ({odds(chances[name])})" for name in ranked.contenders])
        said = f"{listed} could each score highest: the evidence does not separate them. {winner} is preferred: "
        said += _preference(ranked, quality, noise)
    if unknown:
        said += f" The noise of {_listed(unknown)} was not measured, so differences are taken at face value."
    if len(ranked.contenders) == 1 and ranked.near_weights < FRAGILE:
        near = f"{ranked.near_weights:.0%} of the weightings near the profile's"
        said += f" The choice depends on the weights: {winner} ranks first under {near}."
    return said


def _preference(ranked: Ranked, quality: Mapping[str, float], noise: float) -> str:
    winner, contenders = ranked.winner, list(ranked.contenders)
    if winner == contenders[0]:
        return "it ranks first, and none of the others has a quality that is higher beyond noise."
    if all(quality[winner] > quality[name] + noise for name in contenders[: contenders.index(winner)]):
        return "its quality is higher, beyond noise, than that of every variant ranked before it."
    return "it is the best of them by quality and memory, which a repeated measurement would not change."


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
