"""What a decision follows from, computed once from the evaluations and their samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from scoring.estimate import Evidence
from scoring.lead import Lead
from scoring.losses import TaskLoss
from scoring.metrics import METRICS
from scoring.pareto import pareto_front
from scoring.profile import Profile
from scoring.results import Change, Divergence, divergence_measures
from stages.parts.base.errors import NoWinner
from stages.parts.records.evaluation import Evaluation, TaskScore, by_machine
from stages.parts.samples import evidence
from stages.parts.samples.capacity import within
from stages.parts.samples.lines import Samples
from stages.select.stored import Asked

SPEED: Final = ("latency", "throughput")
"""The metrics that depend on the machine."""


@dataclass(frozen=True)
class Measurements:
    """All fields are by variant, in the order of the names."""

    evaluations: dict[str, Evaluation]
    measured: dict[str, evidence.Measured]
    """Those with all metrics that were measured are finite and positive."""
    unusable: dict[str, str]
    """Why each of the others cannot be scored."""
    gates: dict[str, evidence.Gate]
    gates_of_production: dict[str, evidence.Gate]
    """Against what is in production, if that was measured."""
    losses: dict[str, dict[str, TaskLoss]]
    """Task by task; without the reference."""
    recoveries: dict[str, Lead]
    """ln of the quality divided by the reference's."""
    questions: evidence.Questions
    growths: dict[str, Change]
    """How much longer the answers are than the reference's."""
    divergences: dict[str, Divergence]
    """From the reference; without variants that were measured on another text."""
    reference: str
    """The variant that the others are compared with, unless the profile has fixed values."""
    asked: Asked | None
    """The reference, if it was asked the questions only."""

    @property
    def reference_quality(self) -> tuple[TaskScore, ...]:
        """Return the reference's scores; none if it was neither measured nor asked."""
        if self.asked:
            return self.asked.answers.quality
        return self.evaluations[self.reference].quality if self.reference in self.evaluations else ()

    @property
    def loaded(self) -> list[str]:
        """List the variants whose speed was measured; one that does not pass the gates need not be."""
        return [name for name, variant in self.measured.items() if variant.load is not None]

    @property
    def incomparable(self) -> tuple[str, ...]:
        """List the metrics that say nothing about the variants, because these were measured on different hardware."""
        return SPEED if len(by_machine(self.evaluations)) > 1 else ()

    def evidence(self, profile: Profile) -> Evidence:
        """Gather the evidence of all variants that were loaded, and of a reference that was asked only."""
        loaded = {name: self.measured[name] for name in self.loaded}
        if self.asked:
            # In the order in which they were measured: the first stands in for the reference.
            schedules = (evaluation.schedule for evaluation in self.evaluations.values())
            order = max((schedule.variants for schedule in schedules if schedule), key=len, default=())
            loaded = {name: loaded[name] for name in dict.fromkeys((*order, *loaded)) if name in loaded}
            loaded[self.reference] = evidence.Measured(self.asked.samples, 0)
        try:
            return evidence.evidence_of(loaded, self.reference, profile)
        except ValueError as error:
            raise NoWinner(f"the variants can't be compared: {error}", hint="measure them again in one run") from error

    def criteria(self, profile: Profile) -> Profile:
        """Return the profile without the weights of metrics that are not comparable."""
        weights = profile.weights.model_copy(update=dict.fromkeys(self.incomparable, 0.0))
        if not any(weights.model_dump().values()):
            raise NoWinner(
                "the variants were measured on different hardware, and the profile counts nothing but speed",
                hint="measure them again in one run",
            )
        return profile.model_copy(update={"weights": weights})

    def answer_tokens(self, name: str) -> float | None:
        """Average the tokens of the answers; None if none were counted."""
        tokens = evidence.answer_tokens(self.measured[name].samples) if name in self.measured else {}
        return fmean(tokens.values()) if tokens else None

    def measures(self, name: str) -> dict[str, float | None]:
        """Collect what a profile's constraints can limit of a variant."""
        divergence = divergence_measures(self.divergences.get(name), is_reference=name == self.reference)
        recovery = math.exp(self.recoveries[name].value) if name in self.recoveries else None
        return {**divergence, **(self.measured[name].load or {}), "quality_recovery": recovery}

    def intervals(self, name: str) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield the 95 % intervals of what a profile's constraints can limit, as far as the noise is known."""
        load, slo = self.evaluations[name].load, self.evaluations[name].goodput
        for times in ("ttft_ms", "tpot_ms", "e2el_ms"):
            if intervals := getattr(load, times).intervals:
                yield times.replace("_ms", "_p95_ms"), intervals.p95
        if slo:
            starts: dict[int, list[float]] = defaultdict(list)
            for run in self.measured[name].samples.rounds:
                starts[run.run.restart] += [within(request, slo.ttft_ms, slo.tpot_ms) for request in run.requests]
            if interval := Lead.of_starts([fmean(met) for met in starts.values()]).interval():
                yield "goodput_share", (max(0.0, interval[0]), min(1.0, interval[1]))
        if name in self.recoveries and (interval := self.recoveries[name].interval()):
            yield "quality_recovery", (math.exp(interval[0]), math.exp(interval[1]))
        if divergence := self.divergences.get(name):
            yield "kl_divergence", (divergence.kl_low, divergence.kl_high)
            yield "top1_agreement", (divergence.top1_low, divergence.top1_high)
            if divergence.greedy_low is not None and divergence.greedy_high is not None:
                yield "greedy_agreement", (divergence.greedy_low, divergence.greedy_high)

    def pareto_front(self, able: Sequence[str]) -> dict[str, bool]:
        """Find which of these variants are on their Pareto front, by the metrics that are comparable."""
        comparable = {name: metric for name, metric in METRICS.items() if name not in self.incomparable}
        metrics = [self.evaluations[variant].metrics() for variant in able]
        rows = [
            [row[name] if metric.higher_is_better else -row[name] for name, metric in comparable.items()]
            for row in metrics
        ]
        return dict(zip(able, pareto_front(rows), strict=True))


def measurements_of(
    evaluations: Mapping[str, Evaluation], samples: Mapping[str, Samples], profile: Profile, asked: Asked | None
) -> Measurements:
    evaluations = dict(sorted(evaluations.items()))
    samples = {name: samples[name] for name in evaluations}
    reference = profile.reference_variant
    unusable = {name: why for name in evaluations if (why := _unusable(evaluations[name], samples[name]))}
    usable = {name: samples[name] for name in evaluations if name not in unusable}
    measured = {name: evidence.Measured.of(evaluations[name], sample) for name, sample in usable.items()}
    compared = measured
    if asked:
        samples, usable = samples | {reference: asked.samples}, usable | {reference: asked.samples}
        compared = measured | {reference: evidence.Measured(asked.samples, 0)}
    gates = evidence.gates_of_choice(compared, profile)
    return Measurements(
        evaluations=evaluations,
        measured=measured,
        unusable=unusable,
        gates={name: gates[name] for name in measured},
        gates_of_production=evidence.gates_of_production(measured, profile),
        losses=evidence.losses_of(usable, reference, profile.task_loss),
        recoveries=evidence.recoveries(usable, profile),
        questions=evidence.questions(samples),
        growths=evidence.answer_growths(samples, reference),
        divergences=evidence.divergences(samples, reference),
        reference=reference,
        asked=asked,
    )


def _unusable(evaluation: Evaluation, samples: Samples) -> str:
    """Say why the variant's metrics cannot be scored; empty if they can. A quality of 0 can."""
    unmeasured = [
        name
        for name, value in evaluation.metrics().items()
        if (samples.rounds or name not in SPEED)
        and not (math.isfinite(value) and (value > 0 or (value == 0 and name == "quality")))
    ]
    return "; ".join(f"{name} was not measured" for name in unmeasured)
