"""Which variant to ship, why, and its metrics; and the scores of all: the plot of their parts, the table, and the
trade-offs of quality."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from scoring.metrics import METRICS, TITLES, odds, shown, si, span
from scoring.names import REFERENCE
from scoring.results import Change
from stages.parts.records.production import Candidate, Production
from stages.report import plots
from stages.report.cells import ABSENT, Cell, Table, Variants, cell, interval, percent, row, signed
from stages.report.plots import WIDTH

RELATIONS: Final = {
    "better": "{first} is better",
    "equivalent": "equivalent: within all margins",
    "open": "open: too few data to tell",
}


def score_plots(decision: Production, variants: Variants) -> tuple[Markup, Markup]:
    """Plot the score of each variant: for a wide and for a small screen."""
    bars = [
        plots.Bar(
            variant=candidate.variant,
            style=variants.styles[candidate.variant],
            parts=tuple((metric, decision.weights[metric] * candidate.normalized[metric]) for metric in METRICS),
            score=candidate.score,
            low=candidate.score if candidate.score_low is None else candidate.score_low,
            high=candidate.score if candidate.score_high is None else candidate.score_high,
            chosen=candidate.variant == decision.winner,
        )
        for candidate in decision.candidates
        if candidate.score is not None
    ]
    title = "Score of each variant, by the contribution of each metric"
    return plots.score_bars("score", title, bars, 2 * WIDTH), plots.score_bars("score-narrow", title, bars, WIDTH)


def scores(decision: Production, variants: Variants) -> Table:
    costs = any(candidate.cost for candidate in decision.candidates)
    titles = [cell("Variant"), cell("Score"), cell("Best with")]
    for metric, title in TITLES.items():
        anchor = decision.profile["anchors"][metric]
        titles.append(cell(title, f"{anchor['zero']:g}× = 0, {anchor['one']:g}× = 1"))
    titles += [cell("1 M output tokens")] if costs else []
    answers = any(candidate.answer_tokens for candidate in decision.candidates)
    titles += [cell("Answer")] if answers else []
    rows = []
    for candidate in decision.candidates:
        small = ["dominated"] if candidate.pareto is False else []
        cells = [variants.cell(candidate.variant, *small), *_score(candidate)]
        cells += [_metric(candidate, metric) for metric in METRICS]
        cells += [_cost(candidate)] if costs else []
        cells += [_answer(candidate)] if answers else []
        rows.append(row(*cells, css="winner" if candidate.variant == decision.winner else ""))
        if candidate.excluded:
            why = f"{candidate.variant} is excluded: {candidate.excluded}"
            rows.append(row(Cell((why,), css="text failed", columns=len(titles))))
    return Table("scores", tuple(titles), tuple(rows))


def comparisons(decision: Production, variants: Variants) -> Table | None:
    """Show what the outcome follows from: one row for each variant that the first of the ranking is compared with; None
    if it is the only one that can be chosen."""
    if not decision.comparisons:
        return None
    first = decision.candidates[0].variant
    rows = []
    for comparison in decision.comparisons:
        reach, confidence = "noise of starts not known", "not known"
        if comparison.low is not None and comparison.high is not None:
            reach = f"({signed(comparison.low, 3)} to {signed(comparison.high, 3)})"
            confidence = odds(comparison.confidence)
        result = cell(RELATIONS[comparison.relation].format(first=first), css="text")
        lead = cell(signed(comparison.lead, 3), reach)
        rows.append(row(variants.cell(comparison.other), result, lead, cell(confidence)))
    titles = (cell(f"{first} and"), Cell(("Result",), css="text"), cell("Lead in score"), cell("Confidence"))
    return Table("comparisons", titles, tuple(rows))


def _score(candidate: Candidate) -> tuple[Cell, Cell]:
    """Show the score, and the probability to be the best."""
    if candidate.score is None:
        return cell("excluded", css="failed"), ABSENT
    low, high = candidate.score_low, candidate.score_high
    small = [] if low is None or high is None else [interval(low, high, 2)]
    chance = candidate.chance
    return cell(f"{candidate.score:.3f}", *small), ABSENT if chance is None else cell(odds(chance))


def _metric(candidate: Candidate, metric: str) -> Cell:
    if metric not in candidate.raw:
        return ABSENT
    small: list[str] = []
    if ends := candidate.intervals.get(metric):
        small.append(interval(ends.low, ends.high, 3 if metric == "quality" else 0 if ends.high >= 100 else 1))
    if change := candidate.change.get(metric):
        small += filter(None, changed(change))
    if metric in candidate.normalized:
        small.append(f"counts {candidate.normalized[metric]:z.2f}")
    return cell(shown(metric, candidate.raw[metric]), *small)


def _cost(candidate: Candidate) -> Cell:
    cost = candidate.cost
    if cost is None:
        return ABSENT
    return cell(f"{cost.value:.3g} {cost.currency}", span(cost.low, cost.high, "–"), f"at the {cost.basis}")


def _answer(candidate: Candidate) -> Cell:
    """Show how long an answer is, and what a thousand cost."""
    cost, growth = candidate.cost, candidate.answer_growth
    if candidate.answer_tokens is None:
        return ABSENT
    small = [*filter(None, changed(growth))] if growth else []
    small += [f"{cost.answers:.3g} {cost.currency} for 1,000"] if cost and cost.answers else []
    return cell(f"{candidate.answer_tokens:,.0f} tokens", *small)


def trade_offs(decision: Production, variants: Variants) -> dict[str, Markup]:
    """Plot quality against latency and weights, by metric; empty where fewer than two variants were measured."""
    measured = [candidate for candidate in decision.candidates if candidate.raw]
    if len(measured) < 2:
        return {}
    return {metric: _trade_off(measured, metric, decision, variants) for metric in ("latency", "memory")}


def _trade_off(measured: Sequence[Candidate], metric: str, decision: Production, variants: Variants) -> Markup:
    factor, unit = _unit(metric, max(candidate.raw[metric] for candidate in measured))
    qualities = {candidate.variant: candidate.raw["quality"] for candidate in measured}
    reference = qualities.get(decision.reference)
    points = [
        plots.Point(
            variant=candidate.variant,
            style=variants.styles[candidate.variant],
            x=candidate.raw[metric] / factor,
            y=candidate.raw["quality"],
            x_interval=_interval(candidate, metric, factor),
            y_interval=_quality_interval(candidate, reference),
            chosen=candidate.variant == decision.winner,
            eligible=not candidate.excluded,
            reference=candidate.variant == decision.reference,
        )
        for candidate in measured
    ]
    title = f"Quality versus {TITLES[metric].lower()}"
    return plots.scatter(f"quality-{metric}", title, f"{TITLES[metric]}, {unit}", "quality", points)


def _interval(candidate: Candidate, metric: str, factor: float) -> tuple[float, float] | None:
    ends = candidate.intervals.get(metric)
    return (ends.low / factor, ends.high / factor) if ends else None


def _quality_interval(candidate: Candidate, reference: float | None) -> tuple[float, float] | None:
    """Compute the interval of the difference from the reference on the same items, placed at its quality.

    The variant's own interval would hide that most of its noise is in the items, which both share. The reference has no
    interval then. Where it was not measured (*reference* is None), it is the variant's own.
    """
    if reference is None:
        return _interval(candidate, "quality", 1.0)
    change = candidate.change.get("quality")
    if change is None or change.low is None or change.high is None:
        return None
    return reference * (1 + change.low), reference * (1 + change.high)


def _unit(metric: str, highest: float) -> tuple[float, str]:
    """Choose the factor and the name of the unit of an axis that reaches *highest*."""
    if metric == "latency":
        return 1.0, "ms"
    prefix = si(highest).split()[-1] if " " in si(highest).strip() else ""
    return {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(prefix, 1.0), f"{prefix}B"


@dataclass(frozen=True)
class Tile:
    """One figure of the first screen."""

    title: str
    value: str
    change: str
    """The change from the reference, or why there is none."""
    interval: str = ""
    """95% interval of the change, or empty."""
    verdict: str = ""
    """better, worse, level or empty."""


def sentences(reason: str) -> tuple[str, str]:
    """Divide the decision's reason: the outcome, and the rest (comparison with the reference, excluded variants)."""
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


def tiles(decision: Production) -> list[Tile]:
    """Show the winner's four metrics, and its cost where the platform has a price."""
    winner = decision.chosen
    metrics = [_tile(winner, decision.reference or REFERENCE, metric, title) for metric, title in TITLES.items()]
    if cost := winner.cost:
        reach = f"{span(cost.low, cost.high)}, at the {cost.basis}"
        metrics.append(Tile("1 M output tokens", f"{cost.value:.3g} {cost.currency}", reach))
    return metrics


def _tile(winner: Candidate, reference: str, metric: str, title: str) -> Tile:
    value = shown(metric, winner.raw[metric]) if metric in winner.raw else "–"
    change = winner.change.get(metric)
    if change:
        return Tile(title, value, *changed(change), verdict(metric, change))
    if winner.variant == reference:
        return Tile(title, value, "the reference for the other variants")
    return Tile(
        title, value, f"not comparable with {reference}" if winner.change else f"no {reference} to compare with"
    )


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
