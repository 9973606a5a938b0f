"""The profile's constraints, and which variants keep them."""

from __future__ import annotations

from collections.abc import Mapping

from scoring.constraints import MEASURES, Constraints
from stages.parts.base.settings import REFERENCE
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Candidate, Production, divergence_measures
from stages.report.cells import ABSENT, Cell, Table, Variants, cell, heads, row


def constraints(decision: Production, evaluations: Mapping[str, Evaluation], variants: Variants) -> Table | None:
    """One row for each limit and one column for each measured variant; None where the profile has no limits.

    Args:
        evaluations: by variant; a variant without one is shown as '–' where only its evaluation has the value.
    """
    limits = Constraints.model_validate(decision.profile.get("constraints", {})).limits()
    if not limits:
        return None
    candidates = [each for each in decision.candidates if each.raw]
    reference = next((each.raw.get("quality") for each in candidates if each.variant == REFERENCE), None)
    values = {each.variant: _measures(each, reference, evaluations.get(each.variant)) for each in candidates}
    rows = []
    for name, limit in limits.items():
        measure = MEASURES[name]
        bound = cell(f"{'≥' if measure.higher_is_better else '≤'} {limit:g}")
        cells = [
            _kept(name, each.get(name), limit, readable=variant in evaluations) for variant, each in values.items()
        ]
        rows.append(row(cell(name, f"{measure.meaning}, {measure.unit}"), bound, *cells))
    return Table("constraints", (*heads("Measure", "Limit"), *variants.cells(values)), tuple(rows))


def _measures(candidate: Candidate, reference: float | None, evaluation: Evaluation | None) -> dict[str, float | None]:
    """The variant's value of each measure that can be constrained; *reference* is fp16's quality."""
    quality, memory = candidate.raw.get("quality"), candidate.raw.get("memory")
    return {
        **(evaluation.measures() if evaluation else {}),
        **divergence_measures(candidate.divergence, is_reference=candidate.variant == REFERENCE),
        "quality_recovery": quality / reference if quality is not None and reference else None,
        "memory_gib": memory / 2**30 if memory is not None else None,
        "e2el_p95_ms": candidate.raw.get("latency"),
    }


def _kept(name: str, value: float | None, limit: float, *, readable: bool) -> Cell:
    """A variant without the value breaks the constraint, unless its evaluation could not be read."""
    if value is None:
        return cell("not measured ✗", css="failed") if readable else ABSENT
    kept = value >= limit if MEASURES[name].higher_is_better else value <= limit
    return cell(f"{value:.4g} {'✓' if kept else '✗'}", css="ok" if kept else "failed")
