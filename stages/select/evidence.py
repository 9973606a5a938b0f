"""What a decision follows from, computed once from the evaluations and their samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stages.parts.base.settings import REFERENCE
from stages.parts.records.evaluation import Evaluation, by_machine
from stages.parts.records.production import Divergence, divergence_measures
from stages.parts.samples.lines import Samples
from stages.select.divergence import divergence_draws, divergence_record, divergences
from stages.select.draws import Questions, metric_draws, questions

if TYPE_CHECKING:
    import pandas as pd

    from scoring.draws import Draws

SPEED: Final = ("latency", "throughput")
"""The metrics that depend on the machine."""


@dataclass(frozen=True)
class Evidence:
    """All fields are by variant."""

    evaluations: dict[str, Evaluation]
    """In the order of the names."""
    draws: Draws
    questions: Questions
    divergences: dict[str, Divergence]
    """From fp16; without variants that were measured on another text."""

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

    def measures(self) -> dict[str, dict[str, float | None]]:
        """What a profile's constraints can limit."""
        return {
            name: each.measures() | divergence_measures(self.divergences.get(name), is_reference=name == REFERENCE)
            for name, each in self.evaluations.items()
        }

    def pareto_front(self, eligible: Sequence[str]) -> dict[str, bool]:
        """Whether each of these variants is on their Pareto front."""
        from scoring.pareto import pareto_front

        comparable = self.raw.loc[list(eligible)].assign(**dict.fromkeys(self.incomparable, 0.0))
        return {str(name): bool(each) for name, each in pareto_front(comparable).items()}


def evidence_of(
    evaluations: Mapping[str, Evaluation], samples: Mapping[str, Samples], limits: Collection[str]
) -> Evidence:
    """Compute the evidence.

    Args:
        limits: the measures that the profile constrains.

    Raises:
        DamagedModel: raw samples are not what was written.
    """
    evaluations = dict(sorted(evaluations.items()))
    asked, diverged = questions(evaluations, samples), divergences(samples, REFERENCE)
    drawn = {
        name: {**each, **(divergence_draws(diverged[name]) if name in diverged else {})}
        for name, each in metric_draws(evaluations, samples, asked, limits).items()
    }
    return Evidence(evaluations, drawn, asked, {name: divergence_record(each) for name, each in diverged.items()})
