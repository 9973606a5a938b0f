"""A decision in words: sentences that agree with its numbers, a table, and notes of what else its reader has to know
about the measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Final

from scoring.choice import Verdict
from scoring.constraints import bound_of, meets
from scoring.criteria import MARGIN_OF, Criteria
from scoring.metrics import METRICS, TITLES, odds, shown
from scoring.names import REFERENCE
from scoring.results import Change
from stages.parts.records.evaluation import Evaluation, by_machine, grouped
from stages.parts.records.production import Price, Production
from stages.parts.samples.evidence import Questions
from stages.select.measurements import Measurements
from stages.select.stored import Asked

NOTED: Final = 0.05
"""A note says if the machine was slower by more than this share for a variant."""


def notes_of(measurements: Measurements, limits: Mapping[str, float], price: Price | None) -> list[str]:
    """Note values near a limit, different hardware, a machine that changed its speed or was shared, variants that were
    overloaded or have no cost, and questions that were not asked or not of all."""
    evaluations, questions = measurements.evaluations, measurements.questions
    return [
        *kept_answers(measurements.asked),
        *near_limits(measurements, limits),
        *different_hardware(evaluations),
        *slower_machine(machine_speeds(evaluations)),
        *changed_speed(evaluations),
        *shared_machine(evaluations),
        *with_adapters(evaluations),
        *on_other_gpus(evaluations),
        *capacity_limits(evaluations),
        *(without_cost(evaluations) if price else ()),
        *not_asked(evaluations),
        *different_questions(questions),
        *without_items(evaluations, questions),
    ]


def kept_answers(asked: Asked | None) -> Iterator[str]:
    """Note where the answers come from by which the losses are judged."""
    if asked:
        yield (
            f"{asked.answers.variant} was asked the questions and not loaded, because it does not fit as the variants "
            f"are served: its answers are those of {asked.answers.origin}."
        )


def near_limits(measurements: Measurements, limits: Mapping[str, float]) -> Iterator[str]:
    """Note each value whose 95 % interval crosses a limit."""
    for name in measurements.measured:
        values, intervals = measurements.measures(name), dict(measurements.intervals(name))
        for measure, limit in limits.items():
            value, interval = values.get(measure), intervals.get(measure)
            if value is None or interval is None or not math.isfinite(value):
                continue
            low, high = min(interval[0], value), max(interval[1], value)
            if meets(measure, low, limit) != meets(measure, high, limit):
                yield (
                    f"{name} {'meets' if meets(measure, value, limit) else 'violates'} {bound_of(measure, limit)} "
                    f"for {measure} with {value:.4g}, but its 95 % interval of {low:.4g} to {high:.4g} "
                    "crosses the limit."
                )


def with_adapters(evaluations: Mapping[str, Evaluation]) -> Iterator[str]:
    if names := sorted({name for evaluation in evaluations.values() for name in evaluation.adapters}):
        yield f"The variants were measured, and the winner is served, with the LoRA adapters {', '.join(names)}."


def on_other_gpus(evaluations: Mapping[str, Evaluation]) -> Iterator[str]:
    shares = {name: f"{run.gpu_share:.3g}" for name, run in sorted(evaluations.items()) if run.gpu_share != 1}
    for share, names in grouped(shares).items():
        yield (
            f"A server of {', '.join(names)} had {share} of the GPUs of the others and of their load: throughput and "
            "cost are those of as many servers (serving.replicas, kserve.scaling) as the same GPUs hold."
        )


def different_hardware(evaluations: Mapping[str, Evaluation]) -> Iterator[str]:
    machines = by_machine(evaluations)
    if len(machines) > 1:
        listed = "; ".join(f"{', '.join(names)} on {hardware}" for hardware, names in machines.items())
        yield (
            f"The variants were measured on different hardware ({listed}): latency and throughput are not "
            "comparable and do not count in the score."
        )


def machine_speeds(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """Compute the speed of the machine when each variant was measured: the geometric mean of its probes. Variants
    measured on GPUs are missing, because GPUs are not probed.

    Blocks compare the variants within minutes of each other and in an order that rotates, so that a drift of the
    machine is part of the noise of starts. Where a server is started only once, nothing else shows it than these
    probes. Measured values are never scaled by them, because the effect of a slower machine depends on what limits the
    load.
    """
    return {
        name: geometric_mean([speed for probe in drift.probes() for speed in probe.model_dump().values()])
        for name, evaluation in evaluations.items()
        if (drift := evaluation.drift) and not evaluation.hardware.gpus
    }


def slower_shares(shares: Mapping[str, float]) -> str:
    """List the variants for which the machine was slower by more than a note needs; empty if there are none."""
    return ", ".join(f"{share:.0%} slower for {name}" for name, share in shares.items() if share > NOTED)


def slower_machine(speeds: Mapping[str, float]) -> Iterator[str]:
    """Note a machine that was not equally fast for all variants."""
    fastest = max(speeds, key=lambda name: speeds[name], default="")
    if slower := slower_shares({name: 1 - speed / speeds[fastest] for name, speed in speeds.items()}):
        yield f"The machine itself was {slower} than for {fastest}; latency and throughput are reported as measured."


def changed_speed(evaluations: Mapping[str, Evaluation]) -> Iterator[str]:
    probed = {name: run.drift for name, run in sorted(evaluations.items()) if run.drift and not run.hardware.gpus}
    changes = {name: drift.largest_change for name, drift in probed.items()}
    changed = grouped({name: f"{change:.0%}" for name, change in changes.items() if change > NOTED})
    for change, names in changed.items():
        yield f"The speed of the machine changed by {change} while the load of {', '.join(names)} was measured."


def shared_machine(evaluations: Mapping[str, Evaluation]) -> Iterator[str]:
    shared = grouped({name: ", ".join(run.beside) for name, run in sorted(evaluations.items()) if run.beside})
    for models, names in shared.items():
        yield f"The machine was serving {models} while {', '.join(names)} was measured."


def capacity_limits(evaluations: Mapping[str, Evaluation]) -> Iterator[str]:
    """Note the variants that were overloaded, and those whose capacity is higher than any rate that was tried."""
    at_least = []
    for name, evaluation in sorted(evaluations.items()):
        capacity, rate_per_s = evaluation.capacity, evaluation.load.rate_per_s
        if capacity and rate_per_s and capacity.requests_per_s < rate_per_s:
            yield (
                f"{name} can serve only {capacity.requests_per_s:.3g} requests/s within the latency targets, and its "
                f"latency was measured at {rate_per_s:.3g}, as that of all variants: it depends on how long was "
                "measured."
            )
        if capacity and capacity.is_lower_bound:
            at_least.append(name)
    if at_least:
        yield (
            f"After a start of {', '.join(at_least)} every rate held that was tried: the capacity is at least what is "
            "given. More trials would find it (workload.trials)."
        )


def without_cost(evaluations: Mapping[str, Evaluation]) -> Iterator[str]:
    names = [
        name
        for name, evaluation in evaluations.items()
        if evaluation.goodput and not (evaluation.capacity or evaluation.goodput).output_tokens_per_s
    ]
    if names:
        yield f"No request of {', '.join(names)} met the latency targets, so there is no cost of tokens within them."


def not_asked(evaluations: Mapping[str, Evaluation]) -> list[str]:
    reasons = {task: why for evaluation in evaluations.values() for task, why in evaluation.not_asked.items()}
    return [f"{task} was not asked: {why}." for task, why in reasons.items()]


def different_questions(questions: Questions) -> Iterator[str]:
    """Note each task in which the variants were asked different questions."""
    for task in {task: None for tasks in questions.values() for task in tasks}:
        names = [set(tasks[task].named()) for tasks in questions.values() if task in tasks]
        common, most = len(set.intersection(*names)), max(map(len, names))
        if common < len(set.union(*names)):
            yield (
                f"Only {common} of {most} questions of {task} are the same for all variants: the others count as "
                "different questions and are not compared in pairs."
            )


def without_items(evaluations: Mapping[str, Evaluation], questions: Questions) -> Iterator[str]:
    """Note the tasks that are not among the questions of every variant, from which the quality is computed."""
    tasks = {score.task: None for evaluation in evaluations.values() for score in evaluation.quality}
    partial = [task for task in tasks if not all(task in variant for variant in questions.values())]
    if partial:
        yield f"Not every variant has items of {', '.join(partial)}: that does not count in any score."


def reason_of(
    verdict: Verdict,
    criteria: Criteria,
    starts: int,
    change: Mapping[str, Change],
    missing: Sequence[str],
    excluded: Mapping[str, str],
    anchor: str = "",
) -> str:
    """Say the outcome, and why the winner was chosen.

    *starts* are those of each server, *change* the winner's metrics compared with the reference's, *missing* the
    variants because of which the decision is incomplete, and *excluded* says why, by variant. *anchor* is the variant
    with whose speed and memory the others are compared, if the reference was asked only.
    """
    unclear = [comparison.other for comparison in verdict.comparisons if comparison.other not in verdict.ranking]
    text = _settled(verdict, criteria, starts)
    if missing:
        text = f"Incomplete: {_listed(missing)} could not be made or measured. Of the others, {text}"
    if change:
        against = dict.fromkeys(METRICS, criteria.reference_variant or "the profile's values")
        if anchor:
            against |= {name: anchor for name in METRICS if name != "quality"}
        for reference, names in grouped(against).items():
            if not anchor or reference != verdict.chosen:
                text += f" Against {reference}: {', '.join(_change(name, change.get(name)) for name in names)}."
    failed = [name for name in excluded if name not in unclear]
    for heading, names in (("Not shown to pass the gates", unclear), ("Excluded", failed)):
        if names:
            text += f" {heading}: {'; '.join(f'{name}: {excluded[name]}' for name in names)}."
    return text


def unknown_loss(criteria: Criteria, published: str) -> str:
    """Say that nothing is compared with the model as it was *published*; empty if the variants are."""
    if criteria.reference == published or criteria.requalifies:
        return ""
    unknown = "16 bit" if published == REFERENCE else f"the published {published}"
    compared = criteria.reference_variant or "fixed values"
    return f"The loss against {unknown} is not known: {compared} took the place of {published}. "


def _settled(verdict: Verdict, criteria: Criteria, starts: int) -> str:
    """Say what is known of the variants that can be chosen, whether or not others are missing."""
    by_relation = {
        relation: [comparison for comparison in verdict.comparisons if comparison.relation == relation]
        for relation in ("better", "equivalent", "open")
    }
    chosen, first = verdict.chosen, verdict.ranking[0]
    if by_relation["open"]:
        rivals = _listed([pair.other for pair in by_relation["open"]])
        chance = f" with a probability of {odds(verdict.chances[first])}" if verdict.chances else ""
        return (
            f"{first} ranks first, but there are too few data to tell whether it is better than {rivals}: "
            f"it is the best{chance or ' by what was measured'}, and is chosen until more is known. "
            f"{_more(verdict, starts)}"
        )
    if by_relation["equivalent"]:
        counting = dict.fromkeys(MARGIN_OF[name] for name, share in criteria.weights.shares().items() if share)
        margins = _listed([f"{100 * getattr(criteria.margins, name):.3g}% in {name}" for name in counting])
        equal = _listed([first, *(pair.other for pair in by_relation["equivalent"])])
        worse = " Every other is worse." if by_relation["better"] else ""
        return (
            f"{equal} are equivalent: they differ by less than {margins}.{worse} "
            f"{chosen} is chosen as the cheapest to run, by memory, then by speed."
        )
    if by_relation["better"]:
        sure = odds(min(pair.confidence for pair in by_relation["better"]))
        return (
            f"{chosen} is better than {_listed([pair.other for pair in by_relation['better']])}, "
            f"with a confidence of {sure}."
        )
    alone = len(verdict.chances) < 2
    return f"{chosen} is the only variant that can be chosen." if alone else f"{chosen} is better than every other."


def _more(verdict: Verdict, starts: int) -> str:
    if verdict.more:
        wishes = [f"{verdict.more.starts} more starts of each server"] if verdict.more.starts else []
        wishes += [f"{verdict.more.items} times as many items of the quality tasks"] if verdict.more.items > 1 else []
        return f"{_listed(wishes)} would settle it."
    if starts < 2:
        return "Each server was started only once, so it is not known how much a restart changes."
    return "No reasonable amount of measuring would settle it."


def _change(metric: str, change: Change | None) -> str:
    if change is None:
        return f"{metric} not comparable"
    text = f"{metric} {change.value:+z.1%}"
    if change.low is None or change.high is None:
        return text
    return text + (" (within noise)" if change.value and change.low <= 0 <= change.high else "")


def markdown(decision: Production) -> str:
    """Write the outcome, and a row per variant by score, the winner in bold; excluded variants have their reason. It is
    an output of select and shown by Argo's UI."""
    metrics = [f"{heading} {decision.weights[name]:.0%}" for name, heading in TITLES.items()]
    rows = [["Variant", "Score", "Best with", *metrics], ["---", "---:", "---:", *["---:"] * len(metrics)]]
    for candidate in decision.candidates:
        name = f"**{candidate.variant}**" if candidate.variant == decision.winner else candidate.variant
        if candidate.excluded:
            reason = " ".join(candidate.excluded.split()).replace("|", "\\|")
            rows.append([name, f"excluded: {reason}", "–", *["–"] * len(metrics)])
        else:
            raw, counts = candidate.raw, candidate.normalized
            values = [f"{shown(metric, raw[metric])} → {counts[metric]:z.2f}" for metric in TITLES]
            rows.append([name, candidate.score_text, candidate.chance_text, *values])
    return "\n".join([f"{decision.headline}\n", *(f"| {' | '.join(cells)} |" for cells in rows)])


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
