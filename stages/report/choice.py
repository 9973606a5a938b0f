"""The first screen of the report: which variant to ship, how sure that is, and the winner's metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from scoring.metrics import METRICS, odds, shown, span
from stages.parts.base.settings import REFERENCE
from stages.parts.records.production import Candidate, Change, Production
from stages.report.cells import percent, signed

TITLES: Final = {"quality": "Quality", "latency": "p95 latency", "throughput": "Throughput", "memory": "Weights"}


@dataclass(frozen=True)
class Tile:
    """One figure of the first screen."""

    title: str
    value: str
    change: str
    """The change from fp16, or why there is none."""
    interval: str = ""
    """95% interval of the change, or empty."""
    verdict: str = ""
    """better, worse, level or empty."""


@dataclass(frozen=True)
class Choice:
    """What the first screen says of a decision."""

    winner: str
    confidence: str
    reason: str
    lead: str
    details: str
    """The rest of the reason: the comparison with fp16, and which variants are excluded."""
    tiles: tuple[Tile, ...]
    compared: bool
    """Whether the tiles show changes from fp16."""
    notes: tuple[str, ...]


def choice(decision: Production) -> Choice:
    reason, details = sentences(decision.reason)
    return Choice(
        winner=decision.winner,
        confidence=confidence(decision),
        reason=reason,
        lead=lead(decision),
        details=details,
        tiles=tuple(tiles(decision)),
        compared=decision.winner != REFERENCE and any(each.change for each in decision.candidates),
        notes=decision.notes,
    )


def sentences(reason: str) -> tuple[str, str]:
    """The decision's reason in two parts: the verdict, and the rest (comparison with fp16, excluded variants)."""
    found = re.search(r" (?=Against fp16: |Out: |Excluded: )", reason)
    return (reason[: found.start()], reason[found.end() :]) if found else (reason, "")


def confidence(decision: Production) -> str:
    """How sure the choice is, in a few words."""
    winner = winner_of(decision)
    eligible = [each for each in decision.candidates if not each.excluded]
    if winner.win_probability is None or (len(eligible) < 2 and decision.separated):
        return "the only eligible variant"
    again = odds(winner.win_probability)
    if len(eligible) < 2:
        return f"the only eligible variant; would be chosen again with a probability of {again}"
    said = f"scores highest again with a probability of {again}"
    return f"clear: {said}" if decision.separated else f"not separated from the others: {said}"


def lead(decision: Production) -> str:
    """The winner's score compared with the best other one, and how often it is first under other weightings.

    Empty where no other variant was eligible.
    """
    winner, margin = winner_of(decision), decision.margin
    if margin is None:
        return ""
    value, low, high = (signed(each, 3) for each in (margin.value, margin.low, margin.high))
    said = f"Score difference from {margin.over}: {value} (95% interval {low} to {high})."
    if winner.weights_share is not None and winner.any_weights_share is not None:
        near, anywhere = percent(winner.weights_share), percent(winner.any_weights_share)
        said += f" First under {near} of the weightings near the profile’s, {anywhere} of all."
    return said


def winner_of(decision: Production) -> Candidate:
    return next(each for each in decision.candidates if each.variant == decision.winner)


def tiles(decision: Production) -> list[Tile]:
    """The winner's four metrics, and its cost where the platform has a price."""
    winner = winner_of(decision)
    found = [_tile(winner, metric, title) for metric, title in TITLES.items()]
    if winner.cost:
        cost = winner.cost
        reach = f"{span(cost.low, cost.high)}, at the {cost.basis}"
        found.append(Tile("1 M output tokens", f"{cost.value:.3g} {cost.currency}", reach))
    return found


def _tile(winner: Candidate, metric: str, title: str) -> Tile:
    value = shown(metric, winner.raw[metric]) if metric in winner.raw else "–"
    change = winner.change.get(metric)
    if change:
        return Tile(title, value, *changed(change), verdict(metric, change))
    if winner.variant == REFERENCE:
        return Tile(title, value, "the reference for the other variants")
    return Tile(title, value, "not comparable with fp16" if winner.change else "no fp16 to compare with")


def changed(change: Change) -> tuple[str, str]:
    """A change in percent, and its 95% interval; the interval is empty where it has no width."""
    low, high = signed(100 * change.low, 1), signed(100 * change.high, 1)
    return f"{signed(100 * change.value, 1)}%", "" if change.low == change.high else f"({low} to {high})"


def verdict(metric: str, change: Change) -> str:
    """better or worse where the interval of the change excludes 0, else level."""
    if change.low <= 0 <= change.high:
        return "level"
    return "better" if (change.low > 0) == METRICS[metric].higher_is_better else "worse"
