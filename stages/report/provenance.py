"""Where the report's figures come from: the measurement's setup, how the variants were made, and the run's stages."""

from __future__ import annotations

from collections.abc import Sequence

from scoring.metrics import si
from stages.parts.base.program import Outcome
from stages.parts.records.acquired import Acquired
from stages.parts.records.evaluation import Evaluation, by_machine
from stages.parts.records.variant import Variant
from stages.report.cells import Cell, Fact, Row, Table, Variants, cell, count, gib, heads, percent, row


def setup(base: Acquired | None, evaluations: Sequence[Evaluation]) -> list[Fact]:
    """Describe the model, and what its variants were measured on and with."""
    facts = []
    if base:
        model = f"{base.model}, {base.architecture}, {si(base.parameters)} weights"
        facts.append(Fact("Model", f"{model}, license {base.license or 'not stated'}"))
        facts.append(Fact("Source", f"{base.source}, commit", code=base.commit))
    if not evaluations:
        return facts
    facts += _hardware(evaluations)
    first = evaluations[0]
    engine = first.engine
    cores = f", on {len(engine.cores)} of the cores" if engine.cores else ""
    served = f"{engine.name} {engine.version}, served in {engine.dtype}:"
    facts.append(Fact("Engine", served, code=" ".join(engine.arguments), rest=cores))
    facts.append(Fact("Versions", ", ".join(f"{name} {version}" for name, version in first.tool_versions.items())))
    facts.append(Fact("Workload", workload(first)))
    facts.append(Fact("Protocol", f"{protocol(first)}, {first.load.requests} requests per variant"))
    facts += _drift(evaluations)
    return facts + [
        Fact(
            "Shared machine",
            f"while {evaluation.variant} was measured, the same machine served {', '.join(evaluation.beside)}",
            css="failed",
        )
        for evaluation in evaluations
        if evaluation.beside
    ]


def _hardware(evaluations: Sequence[Evaluation]) -> list[Fact]:
    groups, facts = machines(evaluations), []
    for group in groups:
        names = f" of {', '.join(evaluation.variant for evaluation in group)}" if len(groups) > 1 else ""
        machine = group[0].hardware
        able = [machine.processor.name] if machine.processor else []
        parts = [f"{machine.cores} × {machine.cpu}", *able, gib(machine.memory_bytes), *machine.gpus]
        facts.append(Fact(f"Hardware{names}", ", ".join(parts)))
    return facts


def machines(evaluations: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Group the evaluations that were measured on the same hardware."""
    names = by_machine({evaluation.variant: evaluation for evaluation in evaluations})
    return [[evaluation for evaluation in evaluations if evaluation.variant in group] for group in names.values()]


def workload(evaluation: Evaluation) -> str:
    settings = evaluation.workload
    name, tokens = settings.get("name", "unnamed"), ""
    if settings.get("prompt_tokens"):
        tokens = f": {settings['prompt_tokens']} tokens in, {settings['output_tokens']} out"
    rate = evaluation.load.rate_per_s
    return f"{name}{tokens}, {f'{rate:.3g} requests/s' if rate else f'{evaluation.load.concurrency} in flight'}"


def protocol(evaluation: Evaluation) -> str:
    """Say how often the variants were measured, and in which order."""
    if (schedule := evaluation.schedule) is not None:
        blocks = count(len(evaluation.looks), "block")
        spent = f"{schedule.spent_s / 60:.1f} of {schedule.budget_s / 60:g} minutes"
        return f"{blocks} of one start of each server in {spent}: {schedule.said}"
    return f"{count(len(evaluation.rounds), 'round')} of load"


def _drift(evaluations: Sequence[Evaluation]) -> list[Fact]:
    """Say how much the machine's own speed changed while each variant was measured."""
    changes = [
        f"{evaluation.variant} {percent(evaluation.drift.largest_change)}"
        for evaluation in evaluations
        if evaluation.drift
    ]
    if not changes:
        return []
    scope = " (CPU only: a GPU’s drift is not measured)" if evaluations[0].hardware.gpus else ""
    return [Fact("Machine drift", ", ".join(changes) + scope)]


def variants_made(made: Sequence[Variant], variants: Variants) -> Table:
    titles = ("Variant", "Bits", "Unquantized dtype", "Weights", "Seconds", "Peak memory", "Made by", "Digest")
    return Table("variants", heads(*titles), tuple(_variant(variant, variants) for variant in made))


def _variant(made: Variant, variants: Variants) -> Row:
    tools = tuple(f"{name} {version}" for name, version in made.tool_versions.items() if name != "python")
    return row(
        variants.cell(made.variant),
        cell(str(made.bits)),
        cell(made.dtype),
        cell(f"{si(made.weights_bytes)}B"),
        cell(f"{made.seconds:.1f}"),
        cell(gib(made.peak_memory_bytes)),
        Cell(tools),
        cell(made.digest[:12], code=True),
    )


def stages_run(outcomes: Sequence[Outcome]) -> Table:
    titles = (*heads("Stage", "Result", "Seconds"), cell("Reason", css="text"))
    return Table("stages", titles, tuple(_stage(outcome) for outcome in outcomes))


def _stage(outcome: Outcome) -> Row:
    return row(
        cell(stage_name(outcome)),
        cell(outcome.result, css="failed" if outcome.result == "failed" else ""),
        cell(f"{outcome.seconds:.1f}"),
        cell(
            outcome.reason,
            *([outcome.hint] if outcome.hint else []),
            *(f"attempt {number} failed: {reason}" for number, reason in enumerate(outcome.retried, 1)),
            css="text",
        ),
    )


def stage_name(outcome: Outcome) -> str:
    return f"{outcome.stage} {outcome.variant}".strip()
