"""The profile's constraints, and which variants keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scoring.constraints import MEASURES, Constraints, meets
from scoring.names import REFERENCE
from scoring.results import divergence_measures
from scoring.units import GIB
from stages.parts.records.evaluation import Evaluation, measures_of
from stages.parts.records.production import Candidate, Loss, Production
from stages.report.cells import ABSENT, Cell, Row, Table, Variants, cell, heads, row, signed


def constraints(decision: Production, evaluations: Sequence[Evaluation], variants: Variants) -> Table | None:
    """Make one row for each limit and each task, one column for each measured variant; None where there are no limits.
    A variant without an evaluation is shown as '–' where only that has the value."""
    limits = Constraints.model_validate(decision.profile.get("constraints", {})).limits()
    candidates = [candidate for candidate in decision.candidates if candidate.raw]
    reference = decision.profile.get("reference", REFERENCE)
    qualities = {candidate.variant: candidate.raw.get("quality") for candidate in candidates}
    quality = reference["quality"] if isinstance(reference, Mapping) else qualities.get(reference)
    by_variant = {evaluation.variant: evaluation for evaluation in evaluations}
    values = {
        candidate.variant: _measures(candidate, quality, by_variant.get(candidate.variant)) for candidate in candidates
    }
    rows = []
    for name, limit in limits.items():
        measure = MEASURES[name]
        bound = cell(f"{'≥' if measure.higher_is_better else '≤'} {limit:g}")
        cells = [
            _kept(name, measures.get(name), limit, readable=variant in by_variant)
            for variant, measures in values.items()
        ]
        rows.append(row(cell(name, f"{measure.meaning}, {measure.unit}"), bound, *cells))
    rows += _losses(candidates)
    if not rows:
        return None
    return Table("constraints", (*heads("Measure", "Limit"), *variants.cells(values)), tuple(rows))


def _measures(candidate: Candidate, reference: float | None, evaluation: Evaluation | None) -> dict[str, float | None]:
    """Collect the variant's value of each measure that can be constrained; *reference* is the quality with which
    its own is compared."""
    quality, memory = candidate.raw.get("quality"), candidate.raw.get("memory")
    return {
        **(measures_of(evaluation.load, evaluation.goodput) if evaluation else {}),
        **divergence_measures(candidate.divergence, is_reference=candidate.variant == REFERENCE),
        "quality_recovery": quality / reference if quality is not None and reference else None,
        "memory_gib": memory / GIB if memory is not None else None,
    }


def _kept(name: str, value: float | None, limit: float, *, readable: bool) -> Cell:
    """Show whether a limit is kept: not by a variant without the value, unless its evaluation could not be read."""
    if value is None:
        return cell("not measured ✗", css="failed") if readable else ABSENT
    is_met = meets(name, value, limit)
    return cell(f"{value:.4g} {'✓' if is_met else '✗'}", css="ok" if is_met else "failed")


def _losses(candidates: Sequence[Candidate]) -> list[Row]:
    """Make one row for each task: what each variant loses, and at most by the one-sided 95 % bound."""
    tasks = {loss.task: loss.limit for candidate in candidates for loss in candidate.losses}
    return [
        row(
            cell(f"loss on {task}", "share of the reference’s score; shown to be lower, by the one-sided 95% bound"),
            cell(f"< {100 * limit:g}%"),
            *(_loss(next((loss for loss in candidate.losses if loss.task == task), None)) for candidate in candidates),
        )
        for task, limit in tasks.items()
    ]


def _loss(loss: Loss | None) -> Cell:
    if loss is None:
        return ABSENT
    good = loss.verdict == "pass"
    text = f"{signed(100 * loss.value, 1)}% {'✓' if good else '✗'}"
    return cell(text, f"at most {signed(100 * loss.high, 1)}%", css="ok" if good else "failed")
