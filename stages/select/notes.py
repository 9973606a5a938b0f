"""The notes of a decision: what else its reader has to know about the measurement."""

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
        f"The variants were measured on different hardware ({told}): latency and throughput are not "
        "comparable and do not count in the score."
    ]


def single_rounds(evaluations: Mapping[str, Evaluation]) -> list[str]:
    names = [name for name, each in evaluations.items() if len(each.rounds) == 1]
    if not names:
        return []
    return [
        f"The load of {', '.join(names)} was measured in a single round: the variation of latency and throughput "
        "between rounds is not known, so their differences may be due to chance."
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


def without_cost(evaluations: Mapping[str, Evaluation]) -> list[str]:
    names = [name for name, each in evaluations.items() if each.goodput and not each.goodput.output_tokens_per_s]
    if not names:
        return []
    return [f"No request of {', '.join(names)} met the latency targets, so there is no cost of tokens within them."]


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
