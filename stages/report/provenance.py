"""Where the report's figures come from, the measurement's setup, how the variants were made and the run's stages; and
how to repeat the run: its command, its settings in a file, and the keys of what was decided."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from typing import Final

from scoring.metrics import si
from scoring.names import REFERENCE
from stages.parts.base.program import Outcome
from stages.parts.base.workload import Workload
from stages.parts.records.acquired import Acquired
from stages.parts.records.evaluation import Evaluation, by_machine
from stages.parts.records.production import Production
from stages.parts.records.variant import Variant
from stages.report.cells import Cell, Fact, Table, Variants, cell, count, gib, heads, percent, row
from stages.report.run_report import RunReport

SETTINGS_FILE: Final = "settings.yaml"
DIGESTS: Final = {"tasks_path": "tasks_digest", "trace": "trace_digest", "divergence_text": "divergence_digest"}
"""The fields of a workload that name files, and the fields of an evaluation's workload with their digests."""


def setup(base: Acquired | None, evaluations: Sequence[Evaluation]) -> list[Fact]:
    """Describe the model, and what its variants were measured on and with."""
    facts = []
    if base:
        published = "" if base.format == REFERENCE else f", published in {base.format}"
        model = f"{base.model}, {base.architecture}, {si(base.parameters)} weights{published}"
        facts.append(Fact("Model", f"{model}, license {base.license or 'not stated'}"))
        facts.append(Fact("Source", f"{base.source}, commit", code=base.commit))
    if not evaluations:
        return facts
    groups = by_machine({evaluation.variant: evaluation for evaluation in evaluations}).values()
    for group in groups:
        machine = next(evaluation.hardware for evaluation in evaluations if evaluation.variant in group)
        able = [machine.processor.name] if machine.processor else []
        parts = [f"{machine.cores} × {machine.cpu}", *able, gib(machine.memory_bytes), *machine.gpus]
        facts.append(Fact(f"Hardware of {', '.join(group)}" if len(groups) > 1 else "Hardware", ", ".join(parts)))
    first, engine = evaluations[0], evaluations[0].engine
    cores = f", on {len(engine.cores)} of the cores" if engine.cores else ""
    versions = dict.fromkeys(f"{each.engine.name} {each.engine.version}" for each in evaluations)
    served = f"{' and '.join(versions)}, served in {engine.dtype}:"
    facts.append(Fact("Engine", served, code=" ".join(engine.arguments), rest=cores))
    facts.append(Fact("Versions", ", ".join(f"{name} {version}" for name, version in first.tool_versions.items())))
    facts.append(Fact("Workload", workload(first)))
    facts.append(Fact("Protocol", f"{protocol(first)}, {first.load.requests} requests per variant"))
    changes = [f"{each.variant} {percent(each.drift.largest_change)}" for each in evaluations if each.drift]
    if changes:
        scope = " (CPU only: a GPU’s drift is not measured)" if first.hardware.gpus else ""
        facts.append(Fact("Machine drift", ", ".join(changes) + scope))
    return facts + [
        Fact(
            "Shared machine",
            f"while {evaluation.variant} was measured, the same machine served {', '.join(evaluation.beside)}",
            css="failed",
        )
        for evaluation in evaluations
        if evaluation.beside
    ]


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


def variants_made(made: Sequence[Variant], variants: Variants) -> Table | None:
    if not made:
        return None
    titles = ("Variant", "Bits", "Unquantized dtype", "Weights", "Seconds", "Peak memory", "Made by", "Digest")
    rows = [
        row(
            variants.cell(variant.variant),
            cell(str(variant.bits)),
            cell(variant.dtype),
            cell(f"{si(variant.weights_bytes)}B"),
            cell(f"{variant.seconds:.1f}"),
            cell(gib(variant.peak_memory_bytes)),
            Cell(tuple(f"{name} {version}" for name, version in variant.tool_versions.items() if name != "python")),
            cell(variant.digest[:12], code=True),
        )
        for variant in made
    ]
    return Table("variants", heads(*titles), tuple(rows))


def stages_run(outcomes: Sequence[Outcome]) -> Table:
    titles = (*heads("Stage", "Result", "Seconds"), cell("Reason", css="text"))
    rows = []
    for outcome in outcomes:
        attempts = [f"attempt {number} failed: {reason}" for number, reason in enumerate(outcome.retried, 1)]
        result = cell(outcome.result, css="failed" if outcome.result == "failed" else "")
        why = cell(outcome.reason, *filter(None, [outcome.hint]), *attempts, css="text")
        name = cell(f"{outcome.stage} {outcome.variant}".strip())
        rows.append(row(name, result, cell(f"{outcome.seconds:.1f}"), why))
    return Table("stages", titles, tuple(rows))


def reproduction(report: RunReport, decision: Production) -> list[Fact]:
    seed = decision.workload.get("seed", Workload.model_fields["seed"].default)
    seeds = f"{seed} for the prompts; resampling is seeded too, so the same samples give the same decision"
    check = f"slipway verify-decision {report.run}"
    settings = settings_file(report)
    digest = hashlib.sha256(settings.encode()).hexdigest()
    return [
        *([Fact("Settings", f"{SETTINGS_FILE}, sha256", code=digest)] if settings else []),
        Fact("Seeds", seeds),
        Fact("Decision", code=decision.key),
        Fact("Release", code=decision.release),
        Fact("Check it", code=check, rest=" recomputes every number from the raw samples"),
    ]


def settings_file(report: RunReport) -> str:
    """Write the run's settings, as ``slipway run --config`` reads them, with comments that tell the digests of files.
    Empty where the settings are not known, and ``command`` does not apply."""
    import yaml

    if not report.settings:
        return ""
    workload = report.decision.workload if report.decision else {}
    digests = {f"workload.{field}": workload.get(digest) for field, digest in DIGESTS.items()}
    calibrated = [variant.calibration_digest for variant in report.variants if variant.calibration_digest]
    digests["optimize.calibration.text"] = calibrated[0] if calibrated else None
    comments = [f"# {field}: sha256 {digest}\n" for field, digest in digests.items() if digest]
    return "".join(comments) + yaml.safe_dump(report.settings, sort_keys=False, allow_unicode=True)


def command(report: RunReport, decision: Production) -> str:
    """Write the command that repeats the run with its settings in a file."""
    # What `slipway run` was given: a name on the Hub, or a local directory.
    source = report.base.source if report.base else ""
    model = source.removeprefix("local:") if source.startswith("local:") else report.model
    words = ["slipway", "run", model, "--config", SETTINGS_FILE]
    if not decision.model.startswith("local/"):
        words += ["--revision", decision.commit]
    if decision.price:
        price = decision.price
        words += ["--set", f"platform.price_per_hour={price.per_hour}", "--set", f"platform.currency={price.currency}"]
    return shlex.join(words)
