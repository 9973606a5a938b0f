"""Quality of each variant, task by task, its divergence from the reference, and which variants keep the profile's
constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from scoring.constraints import MEASURES, Constraints, meets
from scoring.results import Divergence, divergence_measures
from scoring.units import GIB
from stages.parts.records.evaluation import Evaluation, measures_of
from stages.parts.records.production import Candidate, Loss, Production
from stages.report.cells import ABSENT, Cell, Table, Variants, cell, interval, percent, row, signed

LOSS: Final = "share of the reference’s score; shown to be lower, by the one-sided 95% bound"


def quality(
    evaluations: Sequence[Evaluation], decision: Production | None, variants: Variants, reference: str
) -> Table:
    candidates = {candidate.variant: candidate for candidate in decision.candidates} if decision else {}
    tasks = {score.task: score for evaluation in evaluations for score in evaluation.quality}
    divergences = {name: candidate.divergence for name, candidate in candidates.items()}
    measured = (divergences.get(evaluation.variant) for evaluation in evaluations)
    first = next(filter(None, measured), None)
    compared = _divergence_titles(first, reference) if first else []
    titles = [cell("Variant")]
    for task in tasks.values():
        kind = "accuracy" if task.kind == "accuracy" else "bits per byte, lower is better"
        titles.append(cell(task.task, kind, f"{task.items} items"))
    rows = []
    for evaluation in evaluations:
        candidate = candidates.get(evaluation.variant)
        cells = [_score(evaluation, task, candidate) for task in tasks]
        divergence = divergences.get(evaluation.variant)
        cells += _divergence(divergence)[: len(compared)] if divergence else [ABSENT] * len(compared)
        rows.append(row(variants.cell(evaluation.variant), *cells))
    return Table("quality", (*titles, *compared), tuple(rows))


def _score(evaluation: Evaluation, task: str, candidate: Candidate | None) -> Cell:
    score = next((task_score for task_score in evaluation.quality if task_score.task == task), None)
    if score is None:
        return ABSENT
    small = [interval(score.low, score.high, 3)]
    if candidate:
        for pair in filter(lambda pair: pair.task == task, candidate.against_fp16):
            difference, low, high = (signed(value, 4) for value in (pair.difference, pair.low, pair.high))
            small.append(f"{difference} ({low} to {high})")
            if pair.p_value is not None:
                small.append(f"{pair.lost} lost, {pair.gained} gained, p = {pair.p_value:.2g}")
        recovery = candidate.recovery.get(task)
        if candidate.losses and recovery is not None:  # the reference has none
            small.append(f"recovery {percent(recovery, 1)}")
    return cell(f"{score.value:.4f}", *small)


def _divergence_titles(first: Divergence, reference: str) -> list[Cell]:
    positions = f"{first.tokens:,} tokens of {first.documents} held-out texts"
    kl = cell(f"Divergence from {reference}", "KL in nats per token,", "lower is better")
    top1 = cell(f"Top-1 agreement with {reference}", "same most likely next token,", positions)
    if first.greedy_agreement is None:
        return [kl, top1]
    small = "texts continued alike; below,", "the tokens before the first other one"
    return [kl, top1, cell(f"Greedy agreement with {reference}", *small)]


def _divergence(divergence: Divergence) -> list[Cell]:
    """Show the divergence below its titles, of which the last is missing if the first variant has no such figure."""
    reach = interval(100 * divergence.top1_low, 100 * divergence.top1_high, 1)
    kl = cell(f"{divergence.kl:.4f}", interval(divergence.kl_low, divergence.kl_high, 4))
    top1 = cell(percent(divergence.top1_agreement, 1), reach)
    if divergence.greedy_agreement is None or divergence.greedy_prefix is None:
        return [kl, top1, ABSENT]
    reach = interval(100 * (divergence.greedy_low or 0.0), 100 * (divergence.greedy_high or 0.0), 1)
    continued = f"{percent(divergence.greedy_prefix, 1)} of the tokens"
    return [kl, top1, cell(percent(divergence.greedy_agreement, 1), reach, continued)]


def constraints(decision: Production, evaluations: Sequence[Evaluation], variants: Variants) -> Table | None:
    """Make one row for each measured variant, one column for each limit and each task; None where there are no limits.
    A variant without an evaluation is shown as '–' where only that has the value."""
    limits = Constraints.model_validate(decision.profile.get("constraints", {})).limits()
    candidates = [candidate for candidate in decision.candidates if candidate.raw]
    tasks = {loss.task: loss.limit for candidate in candidates for loss in candidate.losses}
    if not limits and not tasks:
        return None
    reference = decision.profile.get("reference", decision.reference)
    qualities = {candidate.variant: candidate.raw.get("quality") for candidate in candidates}
    quality = reference["quality"] if isinstance(reference, Mapping) else qualities.get(reference)
    by_variant = {evaluation.variant: evaluation for evaluation in evaluations}
    titles = [cell("Variant")]
    for name, limit in limits.items():
        measure = MEASURES[name]
        bound = f"{'≥' if measure.higher_is_better else '≤'} {limit:g}"
        titles.append(cell(f"{name} {bound}", f"{measure.meaning}, {measure.unit}", css="wrapped"))
    titles += [cell(f"loss on {task} < {100 * limit:g}%", LOSS, css="wrapped") for task, limit in tasks.items()]
    rows = []
    for candidate in candidates:
        evaluation, losses = by_variant.get(candidate.variant), {loss.task: loss for loss in candidate.losses}
        is_reference = candidate.variant == decision.reference
        values = _measures(candidate, quality, evaluation, is_reference=is_reference)
        cells = [_kept(name, values.get(name), limit, readable=bool(evaluation)) for name, limit in limits.items()]
        rows.append(row(variants.cell(candidate.variant), *cells, *(_loss(losses.get(task)) for task in tasks)))
    return Table("constraints", tuple(titles), tuple(rows))


def _measures(
    candidate: Candidate, reference: float | None, evaluation: Evaluation | None, *, is_reference: bool
) -> dict[str, float | None]:
    """Collect the variant's value of each measure that can be constrained; *reference* is the quality with which
    its own is compared."""
    memory, own = candidate.raw.get("memory"), candidate.raw.get("quality")
    recovery = own / reference if own is not None and reference else None
    if change := candidate.change.get("quality"):  # one that was asked only has no quality of its own here
        recovery = 1 + change.value
    return {
        **(measures_of(evaluation.load, evaluation.goodput) if evaluation else {}),
        **divergence_measures(candidate.divergence, is_reference=is_reference),
        "quality_recovery": recovery,
        "memory_gib": memory / GIB if memory is not None else None,
    }


def _kept(name: str, value: float | None, limit: float, *, readable: bool) -> Cell:
    """Show whether a limit is kept: not by a variant without the value, unless its evaluation could not be read."""
    if value is None:
        return cell("not measured ✗", css="failed") if readable else ABSENT
    is_met = meets(name, value, limit)
    return cell(f"{value:.4g} {'✓' if is_met else '✗'}", css="ok" if is_met else "failed")


def _loss(loss: Loss | None) -> Cell:
    if loss is None:
        return ABSENT
    good = loss.verdict == "pass"
    text = f"{signed(100 * loss.value, 1)}% {'✓' if good else '✗'}"
    return cell(text, f"at most {signed(100 * loss.high, 1)}%", css="ok" if good else "failed")
