"""Which variant to ship, why, and its metrics; what quality each variant loses at which cost, and the scores of all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from scoring.cost import per_million
from scoring.metrics import METRICS, TITLES, odds, shown, span
from scoring.names import REFERENCE
from scoring.results import Change
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Candidate, Production
from stages.report import plots
from stages.report.cells import ABSENT, Cell, Fact, Table, Variants, cell, count, interval, percent, row, signed

RELATIONS: Final = {
    "better": "{first} is better",
    "equivalent": "equivalent: within all margins",
    "open": "open: too few data to tell",
}
ANSWERS: Final = "1,000 answers"
TOKENS: Final = "1 M output tokens"


def score_plots(decision: Production, variants: Variants) -> tuple[Markup, Markup]:
    """Plot the score of each variant, for a wide and for a small screen."""
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
    return plots.score_bars("score", "Score of each variant, by the contribution of each metric", bars)


def scores(decision: Production, variants: Variants) -> Table:
    costs = any(candidate.cost or candidate.answer_tokens for candidate in decision.candidates)
    titles = [cell("Variant"), cell("Score")]
    for metric, title in TITLES.items():
        anchor = decision.profile["anchors"][metric]
        titles.append(cell(title, f"{anchor['zero']:.3g}× = 0, {anchor['one']:.3g}× = 1"))
    titles += [cell("Cost", TOKENS) if decision.price else cell("Answer")] if costs else []
    rows = []
    for candidate in filter(lambda candidate: candidate.raw, decision.candidates):
        small = ["dominated"] if candidate.pareto is False else []
        cells = [variants.cell(candidate.variant, *small), _score(candidate)]
        cells += [_metric(candidate, metric) for metric in METRICS]
        cells += [_cost(candidate)] if costs else []
        rows.append(row(*cells, css="winner" if candidate.variant == decision.winner else ""))
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


def _score(candidate: Candidate) -> Cell:
    """Show the score, and the probability to be the best."""
    if candidate.score is None:
        return cell("excluded", css="failed")
    low, high = candidate.score_low, candidate.score_high
    small = [] if low is None or high is None else [interval(low, high, 2)]
    small += [] if candidate.chance is None else [f"best with {odds(candidate.chance)}"]
    return cell(f"{candidate.score:.3f}", *small)


def _metric(candidate: Candidate, metric: str) -> Cell:
    if metric not in candidate.raw:
        return ABSENT
    small: list[str] = []
    if ends := candidate.intervals.get(metric):
        small.append(interval(ends.low, ends.high, 3 if metric == "quality" else 0 if ends.high >= 100 else 1))
    if change := candidate.change.get(metric):
        small += filter(None, changed(change))
    return cell(shown(metric, candidate.raw[metric]), *small)


def _cost(candidate: Candidate) -> Cell:
    """Show what a million output tokens cost, how long an answer is, and what a thousand cost."""
    cost, growth, lines = candidate.cost, candidate.answer_growth, []
    if cost:
        lines += [f"{cost.value:.3g} {cost.currency}", span(cost.low, cost.high, "–")]
    if candidate.answer_tokens:
        lines += [f"{candidate.answer_tokens:,.0f} tokens", *([changed(growth)[0]] if growth else [])]
    lines += [f"{cost.answers:.3g} {cost.currency}"] if cost and cost.answers else []
    return cell(*lines) if lines else ABSENT


def left_out(decision: Production, evaluations: Sequence[Evaluation]) -> list[Fact]:
    """Say why variants could not be chosen, and which were worse than the first before the last block."""
    starts = {evaluation.variant: len(evaluation.looks) for evaluation in evaluations}
    facts, first = [], decision.candidates[0].variant
    for candidate in decision.candidates:
        name, number = candidate.variant, starts.get(candidate.variant, 0)
        if candidate.excluded:
            facts.append(Fact(name, candidate.excluded))
        elif number < max(starts.values(), default=0) and name in starts:
            facts.append(Fact(name, f"worse than {first} after {count(number, 'start')}, so it was not started again"))
    return facts


def loss_points(decision: Production, variants: Variants) -> list[plots.Point]:
    """Place each variant by what it costs and what quality it loses; none where fewer than two were measured."""
    answers = has_answers(decision)
    points = [_point(candidate, decision, variants, answers=answers) for candidate in decision.candidates]
    measured = [point for point in points if point]
    return measured if len(measured) > 1 else []


def loss_plots(decision: Production, points: Sequence[plots.Point]) -> tuple[Markup, Markup]:
    """Plot what quality is lost at which cost, for a wide and for a small screen."""
    unit = decision.price.currency if decision.price else "hours of the server"
    x_label = f"{unit} for {ANSWERS if has_answers(decision) else TOKENS}"
    return plots.scatter("loss", "Quality lost against cost", x_label, "quality lost, %", points)


def has_answers(decision: Production) -> bool:
    """Return whether the answers of all measured variants were counted."""
    return all(candidate.answer_tokens for candidate in decision.candidates if candidate.raw)


def _point(candidate: Candidate, decision: Production, variants: Variants, *, answers: bool) -> plots.Point | None:
    """Place a variant by its cost and its loss; None without one of the two. Without a price the cost is in hours."""
    change, cost, ends = candidate.change.get("quality"), candidate.cost, candidate.intervals.get("throughput")
    is_reference = candidate.variant == decision.reference
    figure, low, high = (cost.value, cost.low, cost.high) if cost else (None, None, None)
    if decision.price is None and (rate := candidate.raw.get("throughput")):
        figure = per_million(1.0, rate)
        low, high = (per_million(1.0, ends.high), per_million(1.0, ends.low)) if ends else (None, None)
    loss = 0.0 if is_reference else -100 * change.value if change else None
    if figure is None or loss is None:
        return None
    factor = (candidate.answer_tokens or 0.0) / 1000 if answers else 1.0
    reach = None
    if change and change.low is not None and change.high is not None:
        reach = -100 * change.high, -100 * change.low
    return plots.Point(
        variant=candidate.variant,
        style=variants.styles[candidate.variant],
        x=figure * factor,
        y=loss,
        x_interval=None if low is None or high is None else (low * factor, high * factor),
        y_interval=reach,
        chosen=candidate.variant == decision.winner,
        eligible=not candidate.excluded,
    )


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
    """Divide the decision's reason: the outcome, and the comparison with the reference. Without the excluded variants,
    which ``left_out`` lists."""
    reason = re.split(r" (?=Not shown to pass the gates: |Out: |Excluded: )", reason)[0]
    outcome, *compared = re.split(r" (?=Against [^:]+: )", reason, maxsplit=1)
    return outcome, "".join(compared)


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
        metrics.append(Tile(TOKENS, f"{cost.value:.3g} {cost.currency}", reach))
    return metrics


def _tile(winner: Candidate, reference: str, metric: str, title: str) -> Tile:
    value = shown(metric, winner.raw[metric]) if metric in winner.raw else "–"
    change = winner.change.get(metric)
    if change:
        return Tile(title, value, *changed(change), verdict(metric, change))
    if winner.variant == reference:
        return Tile(title, value, "the reference for the other variants")
    why = f"not comparable with {reference}" if winner.change else f"no {reference} to compare with"
    return Tile(title, value, why)


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
