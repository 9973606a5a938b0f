"""Quality of each variant, task by task, and its divergence from fp16."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scoring.names import REFERENCE
from scoring.results import Divergence
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Candidate, Paired, Production
from stages.report.cells import ABSENT, Cell, Row, Table, Variants, cell, heads, interval, percent, row, signed


def quality(evaluations: Sequence[Evaluation], decision: Production | None, variants: Variants) -> Table:
    candidates = {candidate.variant: candidate for candidate in decision.candidates} if decision else {}
    tasks = {score.task: score for evaluation in evaluations for score in evaluation.quality}
    measured = [(evaluation, candidates.get(evaluation.variant)) for evaluation in evaluations]
    rows = []
    for task in tasks.values():
        kind = "accuracy" if task.kind == "accuracy" else "bits per byte, lower is better"
        title = cell(task.task, kind, f"{task.items} items")
        rows.append(row(title, *(_score(evaluation, task.task, candidate) for evaluation, candidate in measured)))
    rows += _divergences([candidate.divergence if candidate else None for _, candidate in measured])
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
        if candidate.variant != REFERENCE and recovery is not None:
            small.append(f"recovery {percent(recovery, 1)}")
    return cell(f"{score.value:.4f}", *small)


def _paired(pair: Paired) -> list[str]:
    """Write the difference from fp16, and for accuracy the answers that changed."""
    difference, low, high = (signed(value, 4) for value in (pair.difference, pair.low, pair.high))
    lines = [f"{difference} ({low} to {high})"]
    if pair.p_value is not None:
        lines.append(f"{pair.lost} lost, {pair.gained} gained, p = {pair.p_value:.2g}")
    return lines


def _divergences(divergences: Sequence[Divergence | None]) -> list[Row]:
    """Make a row for each comparison, one cell for each variant; none where no divergence was measured."""
    first = next(filter(None, divergences), None)
    if first is None:
        return []

    def each_of(label: Cell, shown: Callable[[Divergence], Cell]) -> Row:
        return row(label, *(shown(divergence) if divergence else ABSENT for divergence in divergences))

    measure = "share of tokens with the same most likely next token"
    positions = f"{first.tokens:,} tokens of {first.documents} held-out texts"
    rows = [
        each_of(cell("Divergence from fp16", "KL in nats per token, lower is better"), _kl),
        each_of(cell("Top-1 agreement with fp16", measure, positions), _agreement),
    ]
    if first.greedy_agreement is not None:
        measure = "texts that are continued with the same tokens; below, the share of tokens before the first other one"
        rows.append(each_of(cell("Greedy agreement with fp16", measure), _greedy))
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
