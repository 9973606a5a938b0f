"""What a decision follows from, computed once from the evaluations and their samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from scoring.metrics import METRICS
from stages.parts.base.errors import NoWinner
from stages.parts.records.evaluation import Evaluation, by_machine, machine_of
from stages.parts.records.production import Divergence, divergence_measures
from stages.parts.samples.divergence import divergence_draws, divergence_record, divergences
from stages.parts.samples.evidence import Gate, Measured, evidence_of, gates_of, losses_of, recoveries
from stages.parts.samples.lines import Samples
from stages.parts.samples.questions import Questions, questions
from stages.select.draws import metric_draws

if TYPE_CHECKING:
    import pandas as pd

    from scoring.draws import Draws
    from scoring.estimate import Evidence
    from scoring.losses import TaskLoss
    from scoring.profile import Profile

SPEED: Final = ("latency", "throughput")
"""The metrics that depend on the machine."""


@dataclass(frozen=True)
class Measurements:
    """All fields are by variant, in the order of the names."""

    evaluations: dict[str, Evaluation]
    measured: dict[str, Measured]
    """Those with all metrics that were measured are finite and positive."""
    unusable: dict[str, str]
    """Why each of the others cannot be scored."""
    gates: dict[str, Gate]
    losses: dict[str, dict[str, TaskLoss]]
    """Task by task; without the reference."""
    recoveries: dict[str, float]
    """The quality divided by the reference's."""
    draws: Draws
    questions: Questions
    divergences: dict[str, Divergence]
    """From the reference; without variants that were measured on another text."""
    reference: str
    """The variant that the others are compared with; empty if the profile has fixed values."""

    @property
    def loaded(self) -> list[str]:
        """The variants whose speed was measured; one that does not pass the gates need not be."""
        return [name for name, each in self.measured.items() if each.load is not None]

    @property
    def raw(self) -> pd.DataFrame:
        """One row per variant, the metrics in their units."""
        import pandas as pd

        metrics = {name: each.metrics() for name, each in self.evaluations.items()}
        return pd.DataFrame.from_dict(metrics, orient="index")

    @property
    def incomparable(self) -> tuple[str, ...]:
        """The metrics that say nothing about the variants, because these were measured on different hardware."""
        return SPEED if len(by_machine(self.evaluations)) > 1 else ()

    def on_the_same_hardware(self, name: str) -> bool:
        """Whether the variant was measured on the same hardware as the reference, if there is one."""
        reference = self.evaluations.get(self.reference)
        return reference is None or machine_of(self.evaluations[name]) == machine_of(reference)

    def evidence(self) -> Evidence:
        """The evidence of all variants that were loaded.

        Raises:
            NoWinner: they cannot be compared.
        """
        try:
            return evidence_of({name: self.measured[name] for name in self.loaded}, self.reference)
        except ValueError as error:
            raise NoWinner(f"the variants can't be compared: {error}", hint="measure them again in one run") from error

    def criteria(self, profile: Profile) -> Profile:
        """The profile without the weights of metrics that are not comparable.

        Raises:
            NoWinner: no weight is left.
        """
        weights = profile.weights.model_copy(update=dict.fromkeys(self.incomparable, 0.0))
        if not any(weights.model_dump().values()):
            raise NoWinner(
                "the variants were measured on different hardware, and the profile counts nothing but speed",
                hint="measure them again in one run",
            )
        return profile.model_copy(update={"weights": weights})

    def measures(self) -> dict[str, dict[str, float | None]]:
        """What a profile's constraints can limit."""
        found = {}
        for name, each in self.measured.items():
            apart = divergence_measures(self.divergences.get(name), is_reference=name == self.reference)
            found[name] = {**apart, **(each.load or {}), "quality_recovery": self.recoveries.get(name)}
        return found

    def pareto_front(self, able: Sequence[str]) -> dict[str, bool]:
        """Whether each of these variants is on their Pareto front."""
        from scoring.pareto import pareto_front

        comparable = self.raw.loc[list(able)].assign(**dict.fromkeys(self.incomparable, 0.0))
        return {str(name): bool(each) for name, each in pareto_front(comparable).items()}


def measurements_of(
    evaluations: Mapping[str, Evaluation], samples: Mapping[str, Samples], profile: Profile
) -> Measurements:
    """Compute what the decision needs.

    Raises:
        DamagedModel: raw samples are not what was written.
    """
    evaluations = dict(sorted(evaluations.items()))
    samples = {name: samples[name] for name in evaluations}
    reference = profile.reference if isinstance(profile.reference, str) else ""
    unusable = {name: why for name, each in evaluations.items() if (why := _unusable(each, samples[name]))}
    usable = {name: samples[name] for name in evaluations if name not in unusable}
    measured = {name: Measured.of(evaluations[name], each) for name, each in usable.items()}
    asked, diverged = questions(samples), divergences(samples, reference)
    drawn = metric_draws(evaluations, samples, asked, profile.constraints.limits())
    return Measurements(
        evaluations=evaluations,
        measured=measured,
        unusable=unusable,
        gates=gates_of(measured, profile, profile.constraints),
        losses=losses_of(usable, reference, profile.task_loss),
        recoveries=recoveries(usable, profile),
        draws={
            name: {**each, **(divergence_draws(diverged[name]) if name in diverged else {})}
            for name, each in drawn.items()
        },
        questions=asked,
        divergences={name: divergence_record(each) for name, each in diverged.items()},
        reference=reference,
    )


def _unusable(evaluation: Evaluation, samples: Samples) -> str:
    """Why the variant's metrics cannot be scored; empty if they can."""
    later = () if samples.rounds else SPEED
    metrics = {name: value for name, value in evaluation.metrics().items() if name not in later}
    least = {"quality": 0.0}
    wrong = [name for name in METRICS if name in metrics and not _usable(metrics[name], least.get(name))]
    return "; ".join(f"{name} was not measured" for name in wrong)


def _usable(value: float, least: float | None) -> bool:
    return math.isfinite(value) and (value > 0 if least is None else value >= least)
