"""The notes of a decision: what else its reader has to know about the measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from stages.parts.records.evaluation import Evaluation, by_machine
from stages.parts.records.production import Price
from stages.parts.samples.questions import Questions
from stages.select.draws import machine_speeds, took_turns
from stages.select.measurements import Measurements


def notes_of(evaluations: Mapping[str, Evaluation], price: Price | None, asked: Questions) -> tuple[str, ...]:
    """Different hardware, a machine that changed its speed or was shared, variants that were overloaded or
    have no cost, and questions that were not asked or not of all."""
    from scoring.machine import notes

    machine = [] if took_turns(evaluations) else notes(machine_speeds(evaluations))
    return (
        *different_hardware(evaluations),
        *machine,
        *changed_speed(evaluations),
        *shared_machine(evaluations),
        *overloaded(evaluations),
        *held_every_rate(evaluations),
        *(without_cost(evaluations) if price else ()),
        *not_asked(evaluations),
        *different_questions(asked),
        *without_items(evaluations, asked),
    )


def near_limits(found: Measurements, limits: Mapping[str, float]) -> list[str]:
    """A sentence for each value that may be on the other side of a limit."""
    from scoring.limits import limited_draws, near

    values, drawn = found.measures(), limited_draws(found.draws, found.reference)
    sentences = (
        near(name, measure, limit, each.get(measure), drawn.get(name, {}).get(measure))
        for name, each in values.items()
        for measure, limit in limits.items()
    )
    return [sentence for sentence in sentences if sentence]


def different_hardware(evaluations: Mapping[str, Evaluation]) -> list[str]:
    found = by_machine(evaluations)
    if len(found) < 2:
        return []
    told = "; ".join(f"{', '.join(names)} on {hardware}" for hardware, names in found.items())
    return [
        f"The variants were measured on different hardware ({told}): latency and throughput are not "
        "comparable and do not count in the score."
    ]


def changed_speed(evaluations: Mapping[str, Evaluation]) -> list[str]:
    from scoring.machine import NOTED

    moved: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, each in sorted(evaluations.items()):
        limit = each.workload.get("drift_limit") or NOTED
        if each.drift and not each.hardware.gpus and each.drift.largest_change > limit:
            again = ", also when it was measured again" if each.drift.measured_again else ""
            moved[f"{each.drift.largest_change:.0%}", again].append(name)
    return [
        f"The speed of the machine changed by {change} while the load of {', '.join(names)} was measured{again}."
        for (change, again), names in moved.items()
    ]


def shared_machine(evaluations: Mapping[str, Evaluation]) -> list[str]:
    shared: dict[str, list[str]] = defaultdict(list)
    for name, each in sorted(evaluations.items()):
        if each.beside:
            shared[", ".join(each.beside)].append(name)
    return [
        f"The machine was serving {others} while {', '.join(names)} was measured." for others, names in shared.items()
    ]


def overloaded(evaluations: Mapping[str, Evaluation]) -> list[str]:
    found = {
        name: (each.capacity.requests_per_s, each.load.rate_per_s)
        for name, each in sorted(evaluations.items())
        if each.capacity and each.load.rate_per_s and each.capacity.requests_per_s < each.load.rate_per_s
    }
    return [
        f"{name} can serve only {capacity:.3g} requests/s within the latency targets, and its latency was measured at "
        f"{rate:.3g}, as that of all variants: it depends on how long was measured."
        for name, (capacity, rate) in found.items()
    ]


def held_every_rate(evaluations: Mapping[str, Evaluation]) -> list[str]:
    names = [name for name, each in sorted(evaluations.items()) if each.capacity and each.capacity.is_lower_bound]
    if not names:
        return []
    return [
        f"After a start of {', '.join(names)} every rate held that was tried: the capacity is at least what is given. "
        "More trials would find it (workload.trials)."
    ]


def without_cost(evaluations: Mapping[str, Evaluation]) -> list[str]:
    names = [
        name
        for name, each in evaluations.items()
        if each.goodput and not (each.capacity or each.goodput).output_tokens_per_s
    ]
    if not names:
        return []
    return [f"No request of {', '.join(names)} met the latency targets, so there is no cost of tokens within them."]


def not_asked(evaluations: Mapping[str, Evaluation]) -> list[str]:
    found = {task: why for evaluation in evaluations.values() for task, why in evaluation.not_asked.items()}
    return [f"{task} was not asked: {why}." for task, why in found.items()]


def different_questions(asked: Questions) -> tuple[str, ...]:
    """A note for each task in which the variants were asked different questions."""
    found = []
    for task in {task: None for each in asked.values() for task in each}:
        names = [set(each[task].named()) for each in asked.values() if task in each]
        common, most = len(set.intersection(*names)), max(map(len, names))
        if common < len(set.union(*names)):
            found.append(
                f"Only {common} of {most} questions of {task} are the same for all variants: the others count as "
                "different questions and are not compared in pairs."
            )
    return tuple(found)


def without_items(evaluations: Mapping[str, Evaluation], asked: Questions) -> list[str]:
    """A note if a task is not among the questions of every variant, from which the quality is computed."""
    tasks = {score.task: None for evaluation in evaluations.values() for score in evaluation.quality}
    lacking = [task for task in tasks if not all(task in each for each in asked.values())]
    if not lacking:
        return []
    return [f"Not every variant has items of {', '.join(lacking)}: that does not count in any score."]
