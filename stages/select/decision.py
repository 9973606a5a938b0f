"""The decision as a document, computed from measurements alone: scores, outcome, winner, and the reasons in words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from scoring.choice import Verdict, judge, lacking
from scoring.estimate import Estimate
from scoring.metrics import METRICS
from scoring.names import PRODUCTION
from scoring.profile import Profile
from stages.parts.base.errors import NoWinner
from stages.parts.base.files import digest_of
from stages.parts.base.program import version
from stages.parts.base.settings import parse
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import RULES, Production
from stages.parts.samples.figures import prompt_tokens_per_s
from stages.parts.samples.lines import Samples
from stages.select.candidates import candidates_of
from stages.select.measurements import Measurements, measurements_of
from stages.select.sentences import notes_of, reason_of, unknown_loss
from stages.select.standing import in_words, standing_of
from stages.select.stored import Asked, Basis

APART: Final = "no server of it was loaded beside one that can be compared with the reference"
WORDING: Final = 4
"""Raised when sentences of the document are reworded: ``verify`` does not compare them with those of other versions."""


def decide(
    basis: Basis, evaluations: Mapping[str, Evaluation], samples: Mapping[str, Samples], asked: Asked | None = None
) -> Production:
    """Choose the winner and write the document, which belongs to no run and is not published yet. Reads and writes
    nothing, and gives the same decision for the same input. *asked* is a reference that was not measured.

    Raises:
        NoWinner: every variant lacks a metric, or does not pass the gates; or they cannot be compared.
        DamagedModel: raw samples are not what was written.
    """
    profile = parse(Profile, basis.profile, "the profile")
    measurements = measurements_of(evaluations, samples, profile, asked)
    excluded = _excluded(basis, measurements, profile)
    estimate = Estimate(measurements.evidence(profile), measurements.criteria(profile))
    excluded |= (apart := {name: APART for name in measurements.loaded if name not in estimate.evidence.variants})
    missing = tuple(sorted({*basis.missing, *measurements.unusable, *apart} - {PRODUCTION}))
    verdict = _judged(measurements, estimate, excluded, missing)
    candidates = candidates_of(measurements, estimate, verdict, excluded, basis.price)
    winner = measurements.evaluations[verdict.chosen]
    candidate = next(candidate for candidate in candidates if candidate.variant == winner.variant)
    evidence, base = estimate.evidence, basis.base
    starts = evidence.speed.blocks
    standing = standing_of(basis, measurements, estimate, verdict, excluded)
    excluded.pop(PRODUCTION, None)
    reason = reason_of(verdict, estimate.criteria, starts, candidate.change, missing, excluded, evidence.anchor)
    return Production(
        model=base.model,
        commit=base.commit,
        license=base.license,
        base_digest=base.digest,
        run=None,
        winner=winner.variant,
        release="",
        reason=unknown_loss(profile, base.format) + in_words(standing, winner.variant) + reason,
        wording=WORDING,
        notes=tuple(notes_of(measurements, profile.constraints.limits(), basis.price)),
        rules=RULES,
        slipway=version(),
        outcome=verdict.outcome,
        missing=missing,
        starts=starts,
        comparisons=verdict.comparisons,
        more=verdict.more,
        profile=profile.model_dump(mode="json"),
        weights=profile.weights.shares(),
        units={name: metric.unit for name, metric in METRICS.items()},
        price=basis.price,
        candidates=candidates,
        anchor=evidence.anchor,
        standing=standing,
        workload=winner.workload,
        recipe=winner.recipe,
        engine=winner.engine,
        hardware=winner.hardware,
        prompt_tokens_per_s=prompt_tokens_per_s(samples[winner.variant].runs),
        key=decision_key(basis, measurements.evaluations, asked),
        decided_at=datetime.now(UTC),
    )


def _excluded(basis: Basis, measurements: Measurements, profile: Profile) -> dict[str, str]:
    """Say why variants can't be chosen: those that were not measured, or do not pass the gates, or were not loaded;
    NoWinner if none can be, or the reference was not measured."""
    excluded = basis.excluded | measurements.unusable
    excluded |= {name: "; ".join(gate.reasons) for name, gate in measurements.gates.items() if gate.verdict != "pass"}
    idle = [name for name in measurements.measured if name not in measurements.loaded]
    excluded |= {name: "was not loaded" for name in idle if name not in excluded}
    if basis.production and PRODUCTION not in basis.excluded | measurements.unusable:
        excluded[PRODUCTION] = f"{basis.production}, which serves, is what the winner is compared with"
    why = "; ".join(f"{name}: {reason}" for name, reason in excluded.items())
    if measurements.reference and measurements.reference not in measurements.loaded and not measurements.asked:
        raise NoWinner(
            f"the reference {measurements.reference} was not measured, so nothing can be compared with it ({why})",
            hint="slipway score RUN --set reference=… compares with another variant, or with fixed values",
        )
    if all(name in excluded for name in measurements.loaded):
        hint = f"see the evaluations, or change the profile {profile.name}"
        raise NoWinner(f"No variant can be chosen: {why}.", hint=hint)
    return excluded


def _judged(
    measurements: Measurements, estimate: Estimate, excluded: Mapping[str, str], missing: tuple[str, ...]
) -> Verdict:
    """Judge as at the last look. A variant that was looked at less often than others was beaten by then."""
    able = [name for name in estimate.evidence.variants if name not in excluded]
    unclear = {
        name: measurements.gates[name].more_items
        for name in estimate.evidence.variants
        if measurements.gates[name].verdict == "unclear" and name != PRODUCTION
    }
    looks = {name: measurements.evaluations[name].looks for name in (*able, *unclear)}
    times = max(looks.values(), key=len)
    beaten = [name for name, looked in looks.items() if len(looked) < len(times)]
    verdict = judge(
        estimate.evidence, estimate.criteria, able=able, unclear=unclear, beaten=beaten, times=times or (1.0,)
    )
    return lacking(verdict, missing)


def decision_key(basis: Basis, measured: Mapping[str, Evaluation], asked: Asked | None) -> str:
    """Compute the digest of everything that a decision follows from."""
    return digest_of(
        ({"answers": digest_of(asked.answers)} if asked else {})
        | {
            "version": RULES,
            "profile": basis.profile,
            **({"production": basis.production} if basis.production else {}),
            "price": basis.price and basis.price.model_dump(mode="json"),
            "evaluations": {name: digest_of(evaluation) for name, evaluation in measured.items()},
            "excluded": sorted(basis.excluded),
            "missing": sorted(basis.missing),
        }
    )
