"""What else a reader of a decision has to know of the measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from stages.parts.records.evaluation import Evaluation, by_machine
from stages.parts.records.production import Price
from stages.select.draws import Questions, machine_speeds, took_turns


def notes_of(evaluations: Mapping[str, Evaluation], price: Price | None, asked: Questions) -> tuple[str, ...]:
    """Different hardware, too few rounds, a machine that changed its speed or was shared, variants without a cost, and
    different questions."""
    from scoring.machine import notes

    machine = [] if took_turns(evaluations) else notes(machine_speeds(evaluations))
    return (
        *different_hardware(evaluations),
        *single_rounds(evaluations),
        *machine,
        *changed_speed(evaluations),
        *shared_machine(evaluations),
        *(without_cost(evaluations) if price else ()),
        *different_questions(asked),
    )


def different_hardware(evaluations: Mapping[str, Evaluation]) -> list[str]:
    found = by_machine(evaluations)
    if len(found) < 2:
        return []
    told = "; ".join(f"{', '.join(names)} on {hardware}" for hardware, names in found.items())
    return [
        f"The variants were measured on different hardware ({told}): latency and throughput do not compare, and have "
        "no say in the score."
    ]


def single_rounds(evaluations: Mapping[str, Evaluation]) -> list[str]:
    names = [name for name, each in evaluations.items() if len(each.rounds) == 1]
    if not names:
        return []
    return [
        f"The load of {', '.join(names)} was measured in a single round: how much latency and throughput move between "
        "rounds is not known, so their differences may be chance."
    ]


def changed_speed(evaluations: Mapping[str, Evaluation]) -> list[str]:
    from scoring.machine import NOTED

    moved: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, each in sorted(evaluations.items()):
        limit = each.workload.get("drift_limit") or NOTED
        if each.drift and not each.hardware.gpus and each.drift.largest_change > limit:
            again = ", though it was measured once more for that" if each.drift.measured_again else ""
            moved[f"{each.drift.largest_change:.0%}", again].append(name)
    return [
        f"While the load of {', '.join(names)} was measured, the machine changed its own speed by {change}{again}."
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


def without_cost(evaluations: Mapping[str, Evaluation]) -> list[str]:
    names = [name for name, each in evaluations.items() if each.goodput and not each.goodput.output_tokens_per_s]
    if not names:
        return []
    return [f"No request of {', '.join(names)} met the latency targets, so there is no cost of tokens that do."]


def different_questions(asked: Questions) -> tuple[str, ...]:
    """A note for each task in which the variants were asked different questions."""
    found = []
    for task in {task: None for each in asked.values() for task in each}:
        names = [set(each[task].named()) for each in asked.values() if task in each]
        common, most = len(set.intersection(*names)), max(map(len, names))
        if common < len(set.union(*names)):
            found.append(
                f"Of {task} {common} of {most} questions are the same for all: the others count as different ones, and "
                "are not compared in pairs."
            )
    return tuple(found)
