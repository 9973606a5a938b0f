"""Quality of each variant, task by task, its divergence from the reference, and which variants keep the profile's
constraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from scoring.constraints import MEASURES, Constraints, meets
from scoring.results import Divergence, divergence_measures
from scoring.units import GIB
from stages.parts.records.evaluation import Evaluation, measures_of
from stages.parts.records.production import Candidate, Loss, Paired, Production
from stages.report.cells import ABSENT, Cell, Row, Table, Variants, cell, heads, interval, percent, row, signed


def quality(
    evaluations: Sequence[Evaluation], decision: Production | None, variants: Variants, reference: str
) -> Table:
    candidates = {candidate.variant: candidate for candidate in decision.candidates} if decision else {}
    tasks = {score.task: score for evaluation in evaluations for score in evaluation.quality}
    measured = [(evaluation, candidates.get(evaluation.variant)) for evaluation in evaluations]
    rows = []
    for task in tasks.values():
        kind = "accuracy" if task.kind == "accuracy" else "bits per byte, lower is better"
        title = cell(task.task, kind, f"{task.items} items")
        rows.append(row(title, *(_score(evaluation, task.task, candidate) for evaluation, candidate in measured)))
    rows += _divergences([candidate.divergence if candidate else None for _, candidate in measured], reference)
    names = variants.cells(evaluation.variant for evaluation in evaluations)
    return Table("quality", (*heads("Task"), *names), tuple(rows))


def _score(evaluation: Evaluation, task: str, candidate: Candidate | None) -> Cell:
    score = next((task_score for task_score in evaluation.quality if task_score.task == task), None)
    if score is None:
        return ABSENT
    small = [interval(score.low, score.high, 3)]
    if candidate:
        small += [line for pair in candidate.against_fp16 if pair.task == task for line in _paired(pair)]
        recovery = candidate.recovery.get(task)
        if candidate.losses and recovery is not None:  # the reference has none
            small.append(f"recovery {percent(recovery, 1)}")
    return cell(f"{score.value:.4f}", *small)


def _paired(pair: Paired) -> list[str]:
    """Write the difference from the reference, and for accuracy the answers that changed."""
    difference, low, high = (signed(value, 4) for value in (pair.difference, pair.low, pair.high))
    lines = [f"{difference} ({low} to {high})"]
    if pair.p_value is not None:
        lines.append(f"{pair.lost} lost, {pair.gained} gained, p = {pair.p_value:.2g}")
    return lines


def _divergences(divergences: Sequence[Divergence | None], reference: str) -> list[Row]:
    """Make a row for each comparison, one cell for each variant; none where no divergence was measured."""
    first = next(filter(None, divergences), None)
    if first is None:
        return []

    def each_of(label: Cell, shown: Callable[[Divergence], Cell]) -> Row:
        return row(label, *(shown(divergence) if divergence else ABSENT for divergence in divergences))

    measure = "share of tokens with the same most likely next token"
    positions = f"{first.tokens:,} tokens of {first.documents} held-out texts"
    rows = [
        each_of(cell(f"Divergence from {reference}", "KL in nats per token, lower is better"), _kl),
        each_of(cell(f"Top-1 agreement with {reference}", measure, positions), _agreement),
    ]
    if first.greedy_agreement is not None:
        measure = "texts that are continued with the same tokens; below, the share of tokens before the first other one"
        rows.append(each_of(cell(f"Greedy agreement with {reference}", measure), _greedy))
    return rows


def _kl(divergence: Divergence) -> Cell:
    return cell(f"{divergence.kl:.4f}", interval(divergence.kl_low, divergence.kl_high, 4))


def _agreement(divergence: Divergence) -> Cell:
    reach = interval(100 * divergence.top1_low, 100 * divergence.top1_high, 1)
    return cell(percent(divergence.top1_agreement, 1), reach)


def _greedy(divergence: Divergence) -> Cell:
    if divergence.greedy_agreement is None or divergence.greedy_prefix is None:
        return ABSENT
    reach = interval(100 * (divergence.greedy_low or 0.0), 100 * (divergence.greedy_high or 0.0), 1)
    return cell(percent(divergence.greedy_agreement, 1), reach, f"{percent(divergence.greedy_prefix, 1)} of the tokens")


def constraints(decision: Production, evaluations: Sequence[Evaluation], variants: Variants) -> Table | None:
    """Make one row for each limit and each task, one column for each measured variant; None where there are no limits.
    A variant without an evaluation is shown as '–' where only that has the value."""
    limits = Constraints.model_validate(decision.profile.get("constraints", {})).limits()
    candidates = [candidate for candidate in decision.candidates if candidate.raw]
    reference = decision.profile.get("reference", decision.reference)
    qualities = {candidate.variant: candidate.raw.get("quality") for candidate in candidates}
    quality = reference["quality"] if isinstance(reference, Mapping) else qualities.get(reference)
    by_variant = {evaluation.variant: evaluation for evaluation in evaluations}
    values = {
        name: _measures(candidate, quality, by_variant.get(name), is_reference=name == decision.reference)
        for name, candidate in ((candidate.variant, candidate) for candidate in candidates)
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


def _measures(
    candidate: Candidate, reference: float | None, evaluation: Evaluation | None, *, is_reference: bool
) -> dict[str, float | None]:
    """Collect the variant's value of each measure that can be constrained; *reference* is the quality with which
    its own is compared."""
    memory = candidate.raw.get("memory")
    return {
        **(measures_of(evaluation.load, evaluation.goodput) if evaluation else {}),
        **divergence_measures(candidate.divergence, is_reference=is_reference),
        "quality_recovery": _recovery(candidate, reference),
        "memory_gib": memory / GIB if memory is not None else None,
    }


def _recovery(candidate: Candidate, reference: float | None) -> float | None:
    """Divide the quality by the *reference*'s; one that was asked only has no quality of its own here."""
    if change := candidate.change.get("quality"):
        return 1 + change.value
    quality = candidate.raw.get("quality")
    return quality / reference if quality is not None and reference else None


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
