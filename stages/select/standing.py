"""The winner of a run compared with the release in production: whether it takes that one's place, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scoring.choice import Verdict
from scoring.criteria import MARGIN_OF
from scoring.estimate import Estimate, Shown
from scoring.names import PRODUCTION
from scoring.results import Change
from stages.parts.records.production import Loss, Standing
from stages.parts.samples.evidence import losses_of
from stages.select.candidates import change_of
from stages.select.measurements import Measurements
from stages.select.stored import Basis


def standing_of(
    basis: Basis, measurements: Measurements, estimate: Estimate, verdict: Verdict, excluded: Mapping[str, str]
) -> Standing | None:
    """Compare the winner with what is in production; None if there is nothing to compare it with."""
    if not basis.production:
        return None
    if verdict.standing is None:
        why = excluded.get(PRODUCTION, "was not measured")
        return Standing(release=basis.production, relation="unmeasured", reasons=(why,))
    chosen = verdict.chosen
    samples = {name: measurements.measured[name].samples for name in (PRODUCTION, chosen)}
    losses = losses_of(samples, PRODUCTION, estimate.criteria.task_loss)[chosen]
    gate, relation = measurements.gates_of_production[chosen], verdict.standing.relation
    wanted: Shown = "fail" if relation == "worse" else "unclear"
    return Standing(
        release=basis.production,
        relation=relation,
        reasons=(*(gate.reasons if gate.verdict == wanted else ()), *_metrics(estimate, verdict, wanted)),
        change=_changes(estimate, chosen),
        losses=tuple(Loss(task=task, **vars(loss), verdict=loss.verdict) for task, loss in losses.items()),
    )


def in_words(standing: Standing | None, winner: str) -> str:
    """Say what becomes of the winner, for the beginning of a decision's reason; empty if it was not compared."""
    if standing is None:
        return ""
    release, reasons = standing.release, "; ".join(standing.reasons)
    changes = ", ".join(f"{name} {change.value:+z.1%}" for name, change in standing.change.items())
    if standing.relation == "better":
        return f"Better than {release}, which was in production ({changes}), and worse in nothing beyond the margins. "
    if standing.relation == "not worse":
        return f"Worse in nothing than {release}, which was in production, beyond the margins ({changes}). "
    why = {
        "worse": f"{winner} is worse: {reasons}",
        "open": f"too few data show that {winner} is better and in nothing worse: {reasons or changes}",
        "equivalent": f"{winner} is equivalent to it, within the margins ({changes})",
        "unmeasured": f"it could not be measured beside {winner}: {reasons}",
    }
    return f"Not shown to be better than {release}, which is in production: {why[standing.relation]}. "


def _changes(estimate: Estimate, chosen: str) -> dict[str, Change]:
    """Compute the change of each metric that counts from that of what is in production."""
    differences = estimate.differences(estimate.place(chosen), estimate.place(PRODUCTION))
    return {name: change_of(name, lead) for name, (_, lead) in differences.items()}


def _metrics(estimate: Estimate, verdict: Verdict, wanted: Shown) -> Iterator[str]:
    """Say of each metric that is worse than in production, or may be, by how much."""
    for name, change in _changes(estimate, verdict.chosen).items():
        if verdict.held[name] == wanted:
            chance = "" if change.low == change.high else f" ({change.low:+z.1%} to {change.high:+z.1%})"
            margin = getattr(estimate.criteria.margins, MARGIN_OF[name])
            yield f"{name} {change.value:+z.1%}{chance}, beyond the margin of {100 * margin:.3g}%"
