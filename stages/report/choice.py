"""The first screen of the report: which variant to ship, why, and the winner's metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass

from scoring.metrics import METRICS, TITLES, shown, span
from scoring.names import REFERENCE
from scoring.results import Change
from stages.parts.records.production import Candidate, Production
from stages.report.cells import percent, signed


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


def sentences(reason: str) -> tuple[str, str]:
    """Divide the decision's reason: the outcome, and the rest (comparison with fp16, excluded variants)."""
    second_part = re.search(r" (?=Against [^:]+: |Out: |Excluded: )", reason)
    return (reason[: second_part.start()], reason[second_part.end() :]) if second_part else (reason, "")


def weights(decision: Production) -> str:
    """Say how often the winner is first under other weights; empty where no other variant could be chosen."""
    winner = decision.chosen
    near, anywhere = winner.weights_share, winner.any_weights_share
    if near is None or anywhere is None or sum(not candidate.excluded for candidate in decision.candidates) < 2:
        return ""
    return (
        f"{winner.variant} scores highest under {percent(near)} of the weightings near the profile’s, "
        f"{percent(anywhere)} of all."
    )


def tiles(winner: Candidate) -> list[Tile]:
    """Show the winner's four metrics, and its cost where the platform has a price."""
    metrics = [_tile(winner, metric, title) for metric, title in TITLES.items()]
    if cost := winner.cost:
        reach = f"{span(cost.low, cost.high)}, at the {cost.basis}"
        metrics.append(Tile("1 M output tokens", f"{cost.value:.3g} {cost.currency}", reach))
    return metrics


def _tile(winner: Candidate, metric: str, title: str) -> Tile:
    value = shown(metric, winner.raw[metric]) if metric in winner.raw else "–"
    change = winner.change.get(metric)
    if change:
        return Tile(title, value, *changed(change), verdict(metric, change))
    if winner.variant == REFERENCE:
        return Tile(title, value, "the reference for the other variants")
    return Tile(title, value, "not comparable with fp16" if winner.change else "no fp16 to compare with")


def changed(change: Change) -> tuple[str, str]:
    """Write a change in percent, and its 95% interval; the interval is empty where it has no width or is not known."""
    value = f"{signed(100 * change.value, 1)}%"
    if change.low is None or change.high is None:
        return value, ""
    low, high = signed(100 * change.low, 1), signed(100 * change.high, 1)
    return value, "" if low == high else f"({low} to {high})"


def verdict(metric: str, change: Change) -> str:
    """Call the change better or worse if its interval excludes 0, otherwise level; empty without an interval."""
    if change.low is None or change.high is None:
        return ""
    if change.low <= 0 <= change.high:
        return "level"
    return "better" if (change.low > 0) == METRICS[metric].higher_is_better else "worse"
