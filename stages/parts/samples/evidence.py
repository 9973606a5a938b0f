"""What the scoring functions need, from the samples gathered so far: the evidence that a choice follows from, and the
gates that a variant has to pass to be chosen at all. Variants are compared on the same questions.

A schedule calls these functions while it measures, and a decision once everything is measured; both get the same
results from the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from scoring.arrays import Floats
from scoring.constraints import MEASURES, Constraints, violations
from scoring.criteria import Criteria
from scoring.divergence import Distributions, divergence
from scoring.estimate import Evidence
from scoring.items import Items, growth
from scoring.lead import Lead
from scoring.losses import Quality, TaskLoss, mean_quality, task_losses, task_quality
from scoring.names import PRODUCTION
from scoring.profile import Profile
from scoring.results import Change, Divergence, divergence_measures
from scoring.starts import Effects, comparable, log_means
from scoring.units import GIB
from stages.parts.base.errors import DamagedModel
from stages.parts.records.evaluation import Evaluation, measures_of
from stages.parts.samples.capacity import throughput_of
from stages.parts.samples.lines import MEASURE_AGAIN, AccuracyItem, HeldOutDocument, Item, PerplexityItem, Samples

BEFORE_LOAD: Final = ("quality_recovery", "top1_agreement", "greedy_agreement", "kl_divergence", "memory_gib")
"""The measures that are known before a variant is loaded."""
AGREEMENT: Final = 0.9
"""The least agreement of a server's answers to the fixed questions with the probabilities that it gives to them."""
Questions = Mapping[str, Mapping[str, Items]]
"""The items of each task, by variant and task."""


@dataclass(frozen=True)
class Measured:
    """What was gathered of one variant."""

    samples: Samples
    """The number of a start (``restart``) is that of its block: in a block, all variants get the same requests."""
    memory_bytes: float
    agreement: float | None = None
    """See ``Evaluation.agreement``."""
    load: Mapping[str, float | None] | None = None
    """What the load gives of ``MEASURES`` (``measures_of``); None before any load."""

    @classmethod
    def of(cls, evaluation: Evaluation, samples: Samples) -> Measured:
        load = measures_of(evaluation.load, evaluation.goodput) if samples.rounds else None
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


def evidence_of(measured: Mapping[str, Measured], reference: str = "", criteria: Criteria | None = None) -> Evidence:
    """Gather the evidence of variants whose quality and load were measured, without those that were never started in a
    block with the reference, directly or through others: they can't be compared. Raise ValueError if the variants have
    no quality task in common, or no request that was answered. *reference*: the variant that the others are compared
    with; by default the first. If it was asked only, the first of the others is loaded in its place. *criteria*: those
    by which the variants are judged against what is in production, if that is among them."""
    asked = reference if reference in measured and not measured[reference].samples.rounds else ""
    loaded = [name for name in measured if name != asked]
    logs = speeds([measured[name].samples for name in loaded])
    places = comparable(logs, loaded.index(reference) if reference in loaded else 0)
    names = [name for place, name in enumerate(loaded) if place in places]
    answered = [*names, asked] if asked else names
    quality = mean_quality(list(qualities({name: measured[name].samples for name in answered}).values()))
    memory = np.array([measured[name].memory_bytes for name in names], dtype=float)
    gates = gates_of_production(measured, criteria) if criteria else {}
    standing = {name: gate.verdict for name, gate in gates.items()}
    return Evidence(tuple(names), quality, Effects(logs[:, places]), memory, asked, standing)


def gates_of(measured: Mapping[str, Measured], criteria: Criteria, constraints: Constraints) -> dict[str, Gate]:
    """Judge whether each variant can be chosen, by its loss on each quality task, the profile's constraints and its
    answers.

    Before any load (``Measured.load`` is None), constraints on speed are left out. Without a measured reference, losses
    and divergence are not known: constraints on them are then not met. Raise DamagedModel if raw samples are not what
    was written."""
    samples = {name: variant.samples for name, variant in measured.items()}
    reference = criteria.reference_variant
    losses = losses_of(samples, reference, criteria.task_loss)
    diverged, recovered = divergences(samples, reference), recoveries(samples, criteria)
    growths = answer_growths(samples, reference)
    before_load = constraints.model_copy(update=dict.fromkeys(name for name in MEASURES if name not in BEFORE_LOAD))
    gates = {}
    for name, variant in measured.items():
        values = divergence_measures(diverged.get(name), is_reference=name == reference)
        values["quality_recovery"] = math.exp(recovered[name].value) if name in recovered else None
        values |= {"memory_gib": variant.memory_bytes / GIB, **(variant.load or {})}
        limits = before_load if variant.load is None else constraints
        violated = violations(values, limits)
        if variant.agreement is not None and variant.agreement < AGREEMENT:
            violated.append(
                f"its answers agree with its own probabilities by only {variant.agreement:.2f}, below {AGREEMENT:g}"
            )
        if (longer := growths.get(name)) and (longer.low or 0) > criteria.answer_growth:
            violated.append(
                f"its answers are {longer.value:.0%} longer than those of {reference} ({longer.low:.0%} to "
                f"{longer.high:.0%}), beyond {criteria.answer_growth:.0%}"
            )
        gates[name] = _gate(violated, losses.get(name, {}))
    return gates


def gates_of_choice(measured: Mapping[str, Measured], profile: Profile) -> dict[str, Gate]:
    """Judge whether each variant can be chosen. What is requalified can; ``gates_of_production`` judge it."""
    judged = gates_of(measured, profile, profile.constraints)
    return dict.fromkeys(judged, Gate("pass")) if profile.requalifies else judged


def gates_of_production(measured: Mapping[str, Measured], criteria: Criteria) -> dict[str, Gate]:
    """Judge each variant by what it loses of what is in production, task by task, and how much longer its answers are;
    none if that was not measured. Of another stack all is judged."""
    if PRODUCTION not in measured:
        return {}
    if isinstance(criteria, Profile) and criteria.requalifies:
        return gates_of(measured, criteria, criteria.constraints)
    beside = {name: Measured(variant.samples, variant.memory_bytes) for name, variant in measured.items()}
    return gates_of(beside, criteria.model_copy(update={"reference": PRODUCTION}), Constraints())


def qualities(samples: Mapping[str, Samples]) -> dict[str, Quality]:
    """Estimate the quality on each task that all variants were asked, in the order of the variants."""
    variants = list(questions(samples).values())
    tasks = [task for task in (variants[0] if variants else {}) if all(task in variant for variant in variants)]
    return {task: task_quality([variant[task] for variant in variants]) for task in tasks}


def losses_of(samples: Mapping[str, Samples], reference: str, limit: float) -> dict[str, dict[str, TaskLoss]]:
    """Estimate what each other variant loses of the reference's score on each task, without tasks of which the
    reference can do nothing; there are none without the reference. *limit*: the share that may be lost."""
    if reference not in samples:
        return {}
    base = samples[reference]
    able = {item.task for item in base.items if isinstance(item, PerplexityItem) or item.correct}
    losses = {}
    for name in [name for name in samples if name != reference]:
        tasks = qualities({reference: base, name: samples[name]})
        losses[name] = task_losses({task: quality for task, quality in tasks.items() if task in able}, 1, 0, limit)
    return losses


def recoveries(samples: Mapping[str, Samples], criteria: Criteria) -> dict[str, Lead]:
    """Estimate ln of each variant's quality divided by the reference's; there are none without tasks or reference."""
    names, tasks = list(samples), list(qualities(samples).values())
    if not tasks or (isinstance(criteria.reference, str) and criteria.reference not in samples):
        return {}
    quality = mean_quality(tasks)
    if isinstance(criteria.reference, str):
        base = names.index(criteria.reference)
        variances = [quality.difference_variance(place, base) for place in range(len(names))]
        against = float(quality.logs[base])
    else:
        variances, against = quality.covariance.diagonal().tolist(), math.log(criteria.reference.quality)
    return {
        name: Lead(float(log) - against, 0.0, variance, math.inf)
        for name, log, variance in zip(names, quality.logs, variances, strict=True)
    }


def answer_tokens(samples: Samples) -> dict[tuple[str, str, int], int]:
    """Count the tokens of the answers to the quality tasks' questions, by the items' places; without those that were
    not counted."""
    return {item.place: item.tokens for item in samples.items if isinstance(item, AccuracyItem) and item.tokens}


def answer_growths(samples: Mapping[str, Samples], reference: str) -> dict[str, Change]:
    """Estimate by what share each other variant's answers to the same questions are longer than the *reference*'s, in
    tokens; none where fewer than two were counted of both."""
    base = answer_tokens(samples[reference]) if reference in samples else {}
    growths = {}
    for name in [name for name in samples if name != reference]:
        tokens = answer_tokens(samples[name])
        places = [place for place in tokens if place in base]
        if len(places) > 1:
            growths[name] = growth(*(np.array([each[place] for place in places], float) for each in (base, tokens)))
    return growths


def divergences(samples: Mapping[str, Samples], reference: str) -> dict[str, Divergence]:
    """Compute the divergence of every variant from the *reference*, without variants that were measured on another
    text. Raise DamagedModel if the samples are not distributions."""
    documents = {name: sorted(sample.held_out, key=lambda each: each.document) for name, sample in samples.items()}
    computed: dict[str, Divergence] = {}
    if not (ours := documents.pop(reference, None)):
        return computed
    for name, theirs in documents.items():
        if [document.tokens for document in theirs] != [document.tokens for document in ours]:
            continue
        answers = [document.continued for document in ours], [document.continued for document in theirs]
        recorded = answers if all(map(any, answers)) else None
        try:
            computed[name] = divergence(distributions(ours), distributions(theirs), recorded)
        except ValueError as error:
            raise DamagedModel(
                f"the raw samples of {name} or {reference} are not distributions: {error}", hint=MEASURE_AGAIN
            ) from error
    return computed


def distributions(documents: Iterable[HeldOutDocument]) -> list[Distributions]:
    """Collect the distributions at each position of each held-out document."""
    return [
        Distributions(np.array(document.listed, dtype=np.int64), np.array(document.logprobs, dtype=float))
        for document in documents
    ]


def speeds(samples: Sequence[Samples]) -> Floats:
    """Collect ln of the end-to-end time in ms and of the throughput in output tokens/s, for as many GPUs as the others
    have, shape (blocks, variants, 2); NaN where a variant was not started in a block."""
    blocks = sorted({run.run.restart for variant in samples for run in variant.rounds})
    logs = np.full((len(blocks), len(samples), 2), np.nan)
    for row, block in enumerate(blocks):
        starts = {place: start for place, variant in enumerate(samples) if (start := variant.of_start(block)).rounds}
        times = [
            {(run.run.number, number): one.e2el_ms for run in start.rounds for number, one in enumerate(run.requests)}
            for start in starts.values()
        ]
        requests = sorted({request for by_request in times for request in by_request})
        values = np.array([[by_request.get(request, math.nan) for request in requests] for by_request in times])
        rates = [math.log(throughput_of(start) / samples[place].gpu_share) for place, start in starts.items()]
        logs[row, list(starts)] = np.column_stack([log_means(values), rates])
    return logs


def _gate(violated: Sequence[str], losses: Mapping[str, TaskLoss]) -> Gate:
    lost = {task: loss for task, loss in losses.items() if loss.verdict != "pass"}
    reasons = (*violated, *(loss_sentence(task, loss) for task, loss in lost.items()))
    if violated or any(loss.verdict == "fail" for loss in lost.values()):
        return Gate("fail", reasons)
    if lost:
        return Gate("unclear", reasons, max(loss.more_items for loss in lost.values()))
    return Gate("pass")


def loss_sentence(task: str, loss: TaskLoss) -> str:
    """Say why a loss does not pass, with its numbers."""
    allowed = f"{100 * loss.limit:.3g}%"
    if loss.verdict == "fail":
        return f"loses {loss.value:.1%} of {task} (at least {loss.low:.1%}), more than the {allowed} that may be lost"
    sentence = (
        f"may lose more than {allowed} of {task}: {loss.value:z.1%} by these items, up to {loss.high:z.1%} by chance"
    )
    if loss.more_items < math.inf:
        sentence += f"; {math.ceil(loss.more_items)} times as many items would tell"
    return sentence


def questions(samples: Mapping[str, Samples]) -> dict[str, dict[str, Items]]:
    """Collect ``items_of`` by variant. Two items are the same question if task, doc_id and doc_hash agree; if samples
    have no hashes, if task and doc_id do."""
    hashed = all(item.doc_hash is not None for sample in samples.values() for item in sample.items)
    return {name: items_of(sample, hashed=hashed) for name, sample in samples.items()}


def items_of(samples: Samples, *, hashed: bool) -> dict[str, Items]:
    """Collect the items of each task; for a group of tasks, the items of its tasks. *hashed*: whether a document's hash
    is part of an item's name."""
    by_task: dict[str, list[Item]] = {}
    for item in sorted(samples.items, key=lambda item: item.kind):
        by_task.setdefault(item.task, []).append(item)
    return {task: _items(sorted(items, key=lambda item: item.place), hashed=hashed) for task, items in by_task.items()}


def _items(items: list[Item], *, hashed: bool) -> Items:
    names = tuple(" ".join(map(str, (one.subtask, one.doc_id, *([one.doc_hash] if hashed else [])))) for one in items)
    clusters = None
    if any(item.cluster for item in items):
        clusters = tuple(item.cluster or name for item, name in zip(items, names, strict=True))
    answers = [item for item in items if isinstance(item, AccuracyItem)]
    if answers:
        weights = np.array([item.weight for item in answers])
        correct = np.array([item.correct for item in answers])
        return Items(correct, None, weights if (weights != 1).any() else None, names, clusters)
    texts = [item for item in items if isinstance(item, PerplexityItem)]
    # A text counts by its bytes.
    nats = np.array([item.loglikelihood * item.weight for item in texts])
    return Items(nats, np.array([item.bytes * item.weight for item in texts]), None, names, clusters)
