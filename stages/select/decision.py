"""The decision as a document, computed from measurements alone: scores, outcome, winner, and the reasons in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from scoring.metrics import METRICS
from scoring.profile import Profile
from stages.parts.base.errors import NoWinner
from stages.parts.base.program import version
from stages.parts.base.settings import parse
from stages.parts.base.store import digest_of
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import RULES, Candidate, Production
from stages.parts.samples.figures import prompt_tokens_per_s
from stages.parts.samples.lines import Samples
from stages.select.candidates import candidates_of
from stages.select.fewer_gpus import fewer_gpus_of, sentences_of
from stages.select.measurements import Measurements, measurements_of
from stages.select.notes import near_limits, notes_of
from stages.select.sentences import reason_of
from stages.select.stored import Basis

if TYPE_CHECKING:
    from scoring.choice import Verdict
    from scoring.estimate import Estimate

WORDING: Final = 3
"""Raised when sentences of the document are reworded: ``verify`` does not compare them with those of other versions."""


@dataclass(frozen=True)
class Choice:
    """A winner, with everything that the document says about it."""

    winner: Evaluation
    verdict: Verdict
    estimate: Estimate
    basis: Basis
    profile: Profile
    measurements: Measurements
    missing: tuple[str, ...]
    """The variants that were asked for and could not be made or measured."""
    excluded: dict[str, str]
    """Why, by variant."""
    candidates: tuple[Candidate, ...]


def choose(basis: Basis, evaluations: Mapping[str, Evaluation], samples: Mapping[str, Samples]) -> Choice:
    """Choose the winner. Reads and writes nothing, and gives the same choice for the same input.

    Raises:
        NoWinner: every variant lacks a metric, or does not pass the gates; or they cannot be compared.
        DamagedModel: raw samples are not what was written.
    """
    from scoring.estimate import Estimate

    profile = parse(Profile, basis.profile, "the profile")
    measurements = measurements_of(evaluations, samples, profile)
    excluded = basis.excluded | measurements.unusable
    excluded |= {name: "; ".join(gate.reasons) for name, gate in measurements.gates.items() if gate.verdict != "pass"}
    idle = [name for name in measurements.measured if name not in measurements.loaded]
    excluded |= {name: "was not loaded" for name in idle if name not in excluded}
    _check_choosable(measurements, profile, excluded)
    estimate = Estimate(measurements.evidence(), measurements.criteria(profile))
    apart = [name for name in measurements.loaded if name not in estimate.evidence.variants]
    excluded |= dict.fromkeys(apart, "no server of it was loaded beside one that can be compared with the reference")
    missing = tuple(sorted({*basis.missing, *measurements.unusable, *apart}))
    verdict = _judged(measurements, estimate, excluded, missing)
    return Choice(
        winner=measurements.evaluations[verdict.chosen],
        verdict=verdict,
        estimate=estimate,
        basis=basis,
        profile=profile,
        measurements=measurements,
        missing=missing,
        excluded=excluded,
        candidates=candidates_of(measurements, estimate, verdict, excluded, basis.price),
    )


def _check_choosable(measurements: Measurements, profile: Profile, excluded: Mapping[str, str]) -> None:
    """Check that a variant passed the gates, and that the reference was measured."""
    why = "; ".join(f"{name}: {reason}" for name, reason in excluded.items())
    if measurements.reference and measurements.reference not in measurements.loaded:
        raise NoWinner(
            f"the reference {measurements.reference} was not measured, so nothing can be compared with it ({why})",
            hint="slipway score RUN --set reference=… compares with another variant, or with fixed values",
        )
    if all(name in excluded for name in measurements.loaded):
        raise NoWinner(
            f"No variant can be chosen: {why}.", hint=f"see the evaluations, or change the profile {profile.name}"
        )


def _judged(
    measurements: Measurements, estimate: Estimate, excluded: Mapping[str, str], missing: tuple[str, ...]
) -> Verdict:
    """Judge as at the last look. A variant that was looked at less often than others was beaten by then."""
    from scoring.choice import judge, lacking

    able = [name for name in estimate.evidence.variants if name not in excluded]
    unclear = {
        name: measurements.gates[name].more_items
        for name in estimate.evidence.variants
        if measurements.gates[name].verdict == "unclear"
    }
    looks = {name: measurements.evaluations[name].looks for name in (*able, *unclear)}
    times = max(looks.values(), key=len)
    beaten = [name for name, looked in looks.items() if len(looked) < len(times)]
    verdict = judge(
        estimate.evidence, estimate.criteria, able=able, unclear=unclear, beaten=beaten, times=times or (1.0,)
    )
    return lacking(verdict, missing)


def document(choice: Choice, *, run: str | None, release: str) -> Production:
    """Write the document of a choice.

    Args:
        run: the run that decides, if any.
        release: the release that the winner is published as; empty if it is not published.
    """
    winner, verdict, base = choice.winner, choice.verdict, choice.basis.base
    measurements, price = choice.measurements, choice.basis.price
    candidate = next(candidate for candidate in choice.candidates if candidate.variant == winner.variant)
    layout = fewer_gpus_of(winner, choice.profile.constraints)
    starts = choice.estimate.evidence.speed.blocks
    samples = measurements.measured[winner.variant].samples
    served = samples.smaller if layout and not layout.against else samples
    return Production(
        model=base.model,
        commit=base.commit,
        license=base.license,
        base_digest=base.digest,
        run=run,
        winner=winner.variant,
        release=release,
        reason=reason_of(
            verdict,
            choice.estimate.criteria,
            starts=starts,
            change=candidate.change,
            missing=choice.missing,
            excluded=choice.excluded,
        ),
        wording=WORDING,
        notes=(
            *near_limits(measurements, choice.profile.constraints.limits()),
            *notes_of(measurements.evaluations, price, measurements.questions),
            *([sentences_of(layout, winner.variant, candidate.cost)] if layout else []),
        ),
        rules=RULES,
        slipway=version(),
        outcome=verdict.outcome,
        missing=choice.missing,
        starts=starts,
        comparisons=verdict.comparisons,
        more=verdict.more,
        profile=choice.profile.model_dump(mode="json"),
        weights=choice.profile.weights.shares(),
        units={name: metric.unit for name, metric in METRICS.items()},
        price=price,
        candidates=choice.candidates,
        workload=winner.workload,
        engine=winner.engine,
        hardware=winner.hardware,
        layout=layout,
        prompt_tokens_per_s=prompt_tokens_per_s(served.rounds + served.trials),
        key=decision_key(choice.basis, measurements.evaluations),
        decided_at=datetime.now(UTC),
    )


def decide(basis: Basis, measured: Mapping[str, Evaluation], samples: Mapping[str, Samples]) -> Production:
    """Write the document of a decision that is not published; fails like ``choose``."""
    return document(choose(basis, measured, samples), run=None, release="")


def decision_key(basis: Basis, measured: Mapping[str, Evaluation]) -> str:
    """Compute the digest of everything that a decision follows from."""
    return digest_of(
        {
            "version": RULES,
            "profile": basis.profile,
            "price": basis.price and basis.price.model_dump(mode="json"),
            "evaluations": {name: digest_of(evaluation) for name, evaluation in measured.items()},
            "excluded": sorted(basis.excluded),
            "missing": sorted(basis.missing),
        }
    )
