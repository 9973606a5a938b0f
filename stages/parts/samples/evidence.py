"""What the scoring functions need, from the samples gathered so far: the evidence that a choice follows from, and the
gates that a variant has to pass to be chosen at all.

A schedule calls these functions while it measures, and a decision once everything is measured; both get the same
results from the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from scoring.constraints import MEASURES, Constraints, violations
from scoring.units import GIB
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import divergence_measures
from stages.parts.samples.capacity import throughput_of
from stages.parts.samples.divergence import divergence_record, divergences
from stages.parts.samples.lines import LoadSamples, Samples
from stages.parts.samples.questions import questions

if TYPE_CHECKING:
    from scoring.arrays import Floats
    from scoring.criteria import Criteria
    from scoring.estimate import Evidence
    from scoring.losses import Quality, TaskLoss

BEFORE_LOAD: Final = ("quality_recovery", "top1_agreement", "greedy_agreement", "kl_divergence", "memory_gib")
"""The measures that are known before a variant is loaded."""
AGREEMENT: Final = 0.9
"""The least agreement of a server's answers to the fixed questions with the probabilities that it gives to them."""


@dataclass(frozen=True)
class Measured:
    """What was gathered of one variant."""

    samples: Samples
    """The number of a start (``restart``) is that of its block: in a block, all variants get the same requests."""
    memory_bytes: float
    agreement: float | None = None
    """See ``Evaluation.agreement``."""
    load: Mapping[str, float | None] | None = None
    """What the load gives of ``MEASURES`` (``Evaluation.measures``); None before any load."""

    @classmethod
    def of(cls, evaluation: Evaluation, samples: Samples) -> Measured:
        """What an evaluation and its samples hold."""
        load = evaluation.measures() if samples.rounds else None
        return cls(samples, evaluation.memory.weights_bytes, evaluation.agreement, load)


@dataclass(frozen=True)
class Gate:
    """Whether one variant can be chosen."""

    verdict: Literal["pass", "fail", "unclear"]
    """unclear: it may be good enough, but there are too few items to show it. It is not chosen, and nothing is settled
    as long as it may be better than what is."""
    reasons: tuple[str, ...] = ()
    """One for each thing that fails or is unclear."""
    more_items: float = 1.0
    """How many times the items would settle what is unclear; infinite if no number would."""


def evidence_of(measured: Mapping[str, Measured], reference: str = "") -> Evidence:
    """The evidence of variants whose quality and load were measured, without those that were never started in a block
    with the reference, directly or through others: they can't be compared.

    Args:
        reference: the variant that the others are compared with; by default the first.

    Raises:
        ValueError: the variants have no quality task in common, or no request that was answered.
        DamagedModel: the starts of a server were asked different questions.
    """
    import numpy as np

    from scoring.estimate import Evidence
    from scoring.losses import mean_quality
    from scoring.starts import Effects, comparable

    logs = speeds([each.samples for each in measured.values()])
    names = list(measured)
    place = names.index(reference) if reference in measured else 0
    places = comparable(logs, place)
    within = {names[each]: measured[names[each]] for each in places}
    quality = mean_quality(list(qualities({name: each.samples for name, each in within.items()}).values()))
    memory = np.array([each.memory_bytes for each in within.values()], dtype=float)
    logs = logs[:, places]
    return Evidence(tuple(within), quality, Effects(logs[np.isfinite(logs).any(axis=(1, 2))]), memory)


def gates_of(measured: Mapping[str, Measured], criteria: Criteria, constraints: Constraints) -> dict[str, Gate]:
    """Whether each variant can be chosen, by its loss on each quality task, the profile's constraints and its answers.

    Before any load (``Measured.load`` is None), constraints on speed are left out. Without a measured reference, losses
    and divergence are not known: constraints on them are then not met.

    Raises:
        DamagedModel: raw samples are not what was written.
    """
    samples = {name: each.samples for name, each in measured.items()}
    reference = criteria.reference if isinstance(criteria.reference, str) else ""
    losses = losses_of(samples, reference, criteria.task_loss)
    diverged = {name: divergence_record(each) for name, each in divergences(samples, reference).items()}
    kept = recoveries(samples, criteria)
    found = {}
    for name, each in measured.items():
        told = divergence_measures(diverged.get(name), is_reference=name == reference)
        told |= {"quality_recovery": kept.get(name), "memory_gib": each.memory_bytes / GIB, **(each.load or {})}
        limits = constraints if each.load is not None else _before_load(constraints)
        violated = [violation.text for violation in violations(told, limits)]
        if each.agreement is not None and each.agreement < AGREEMENT:
            violated.append(
                f"its answers agree with its own probabilities by only {each.agreement:.2f}, below {AGREEMENT:g}"
            )
        found[name] = _gate(violated, losses.get(name, {}))
    return found


def qualities(samples: Mapping[str, Samples]) -> dict[str, Quality]:
    """The quality on each task that all variants were asked, in the order of the variants."""
    from scoring.losses import task_quality

    asked = list(questions(samples).values())
    tasks = [task for task in (asked[0] if asked else {}) if all(task in each for each in asked)]
    return {task: task_quality([each[task] for each in asked]) for task in tasks}


def losses_of(samples: Mapping[str, Samples], reference: str, limit: float) -> dict[str, dict[str, TaskLoss]]:
    """What each other variant loses of the reference's score on each task, without tasks of which the reference can do
    nothing; empty without the reference.

    Args:
        limit: the share that may be lost.
    """
    from scoring.losses import task_losses

    if reference not in samples:
        return {}
    whole = samples[reference]
    able = {*(each.task for each in whole.perplexity), *(each.task for each in whole.accuracy if each.correct)}
    found = {}
    for name in [name for name in samples if name != reference]:
        tasks = qualities({reference: whole, name: samples[name]})
        found[name] = task_losses({task: each for task, each in tasks.items() if task in able}, 1, 0, limit)
    return found


def recoveries(samples: Mapping[str, Samples], criteria: Criteria) -> dict[str, float]:
    """The quality of each variant divided by the reference's; empty without tasks or reference."""
    from scoring.losses import mean_quality

    names, tasks = list(samples), list(qualities(samples).values())
    if not tasks or (isinstance(criteria.reference, str) and criteria.reference not in samples):
        return {}
    logs = mean_quality(tasks).logs
    if isinstance(criteria.reference, str):
        whole = float(logs[names.index(criteria.reference)])
    else:
        whole = math.log(criteria.reference.quality)
    return {name: math.exp(float(each) - whole) for name, each in zip(names, logs, strict=True)}


def speeds(samples: Sequence[Samples]) -> Floats:
    """ln of the end-to-end time in ms and of the throughput in output tokens/s, shape (blocks, variants, 2); NaN where
    a variant was not started in a block.

    Raises:
        ValueError: in a block, the variants have no request in common.
    """
    import numpy as np

    blocks = sorted({each.run.restart for given in samples for each in given.rounds})
    found = np.full((len(blocks), len(samples), 2), np.nan)
    for place, block in enumerate(blocks):
        rounds, trials = (
            [[run for run in runs if run.run.restart == block] for runs in of_all]
            for of_all in ([given.rounds for given in samples], [given.trials for given in samples])
        )
        running = [number for number, each in enumerate(rounds) if each]
        found[place, running] = _block([rounds[number] for number in running], [trials[number] for number in running])
    return found


def _block(rounds: Sequence[Sequence[LoadSamples]], trials: Sequence[Sequence[LoadSamples]]) -> Floats:
    """The same for one block, shape (variants, 2)."""
    import numpy as np

    from scoring.starts import log_means

    times = [
        {(each.run.number, place): one.e2el_ms for each in given for place, one in enumerate(each.requests)}
        for given in rounds
    ]
    places = sorted({place for each in times for place in each})
    values = np.array([[each.get(place, math.nan) for place in places] for each in times])
    rates = [math.log(throughput_of(*given)) for given in zip(rounds, trials, strict=True)]
    return np.column_stack([log_means(values), rates])


def _before_load(constraints: Constraints) -> Constraints:
    later = [name for name in MEASURES if name not in BEFORE_LOAD]
    return constraints.model_copy(update=dict.fromkeys(later))


def _gate(violated: Sequence[str], losses: Mapping[str, TaskLoss]) -> Gate:
    lost = {task: each for task, each in losses.items() if each.verdict != "pass"}
    reasons = (*violated, *(loss_sentence(task, each) for task, each in lost.items()))
    if violated or any(each.verdict == "fail" for each in lost.values()):
        return Gate("fail", reasons)
    if lost:
        return Gate("unclear", reasons, max(each.more_items for each in lost.values()))
    return Gate("pass")


def loss_sentence(task: str, loss: TaskLoss) -> str:
    """Why a loss does not pass, with its numbers."""
    allowed = f"{100 * loss.limit:.3g}%"
    if loss.verdict == "fail":
        return f"loses {loss.value:.1%} of {task} (at least {loss.low:.1%}), more than the {allowed} that may be lost"
    said = f"may lose more than {allowed} of {task}: {loss.value:z.1%} by these items, up to {loss.high:z.1%} by chance"
    if loss.more_items < math.inf:
        said += f"; {math.ceil(loss.more_items)} times as many items would tell"
    return said
