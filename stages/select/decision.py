"""The decision as a document, computed from measurements alone: scores, winner, and the reasons in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from scoring.metrics import METRICS
from scoring.profile import Profile
from stages.parts.base.errors import NoWinner
from stages.parts.base.settings import REFERENCE, parse
from stages.parts.base.store import digest_of
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Candidate, Change, Margin, Production
from stages.parts.samples.lines import Samples
from stages.select.candidates import candidates_of
from stages.select.evidence import Evidence, evidence_of
from stages.select.notes import notes_of
from stages.select.stored import Basis

if TYPE_CHECKING:
    from scoring.decide import Decision

DECISION_VERSION: Final = 5
"""Raised when the same measurements would be scored in another way, so that old decisions are not used again."""
WORDING: Final = 2
"""Raised when sentences of the document are reworded: ``verify`` does not compare them with those of other versions."""
METRIC_WORDS: Final = {"quality": "quality", "latency": "p95 latency", "throughput": "throughput", "memory": "memory"}


@dataclass(frozen=True)
class Choice:
    """A winner, with everything that the document says about it."""

    winner: Evaluation
    decision: Decision
    basis: Basis
    profile: Profile
    evidence: Evidence
    excluded: dict[str, str]
    """Why, by variant."""
    candidates: tuple[Candidate, ...]


def choose(basis: Basis, measured: Mapping[str, Evaluation], samples: Mapping[str, Samples]) -> Choice:
    """Choose the winner. Reads and writes nothing, and gives the same choice for the same input.

    Raises:
        NoWinner: every variant lacks a metric, or breaks a constraint.
        DamagedModel: raw samples are not what was written.
    """
    from scoring.decide import decide as decide_by_score

    profile = parse(Profile, basis.profile, "the profile")
    evidence = evidence_of(measured, samples, profile.constraints.limits())
    digests = {name: each.variant_digest for name, each in evidence.evaluations.items()}
    decision = decide_by_score(
        evidence.raw,
        profile,
        evidence.draws,
        evidence.measures(),
        digests=digests,
        incomparable=evidence.incomparable,
    )
    if decision.winner is None:
        raise NoWinner(decision.verdict, hint="see the evaluations, or choose another profile")
    excluded = basis.excluded | {name: "; ".join(reasons) for name, reasons in decision.excluded.items()}
    candidates = candidates_of(evidence, decision, excluded, basis.price)
    return Choice(evidence.evaluations[decision.winner], decision, basis, profile, evidence, excluded, candidates)


def document(choice: Choice, *, run: str | None, release: str) -> Production:
    """The document of a choice.

    Args:
        run: the run that decides, if any.
        release: the release that the winner is published as; empty if it is not published.
    """
    winner, decision, base = choice.winner, choice.decision, choice.basis.base
    evaluations, price = choice.evidence.evaluations, choice.basis.price
    (change,) = (each.change for each in choice.candidates if each.variant == winner.variant)
    return Production(
        model=base.model,
        commit=base.commit,
        license=base.license,
        base_digest=base.digest,
        run=run,
        winner=winner.variant,
        release=release,
        reason=reason_of(decision, change, choice.excluded),
        wording=WORDING,
        notes=(*decision.near_limits, *notes_of(evaluations, price, choice.evidence.questions)),
        separated=decision.separated,
        margin=Margin.model_validate(vars(decision.margin)) if decision.margin else None,
        profile=choice.profile.model_dump(mode="json"),
        weights=choice.profile.weights.shares(),
        noise=decision.noise,
        units={name: metric.unit for name, metric in METRICS.items()},
        price=price,
        candidates=choice.candidates,
        workload=winner.workload,
        engine=winner.engine,
        hardware=winner.hardware,
        key=decision_key(choice.basis, evaluations),
        decided_at=datetime.now(UTC),
    )


def decide(basis: Basis, measured: Mapping[str, Evaluation], samples: Mapping[str, Samples]) -> Production:
    """The document of a decision that is not published.

    Raises:
        NoWinner, DamagedModel: see ``choose``.
    """
    return document(choose(basis, measured, samples), run=None, release="")


def reason_of(decision: Decision, change: Mapping[str, Change], excluded: Mapping[str, str]) -> str:
    """Why the winner was chosen, in sentences that agree with its numbers.

    Args:
        change: the winner's metrics compared with fp16's; empty if it is fp16, or fp16 was not measured.
    """
    said = decision.verdict
    if change:
        said += f" Against {REFERENCE}: {', '.join(_change(name, change.get(name)) for name in METRICS)}."
    if excluded:
        said += " Excluded: " + "; ".join(f"{name}: {why}" for name, why in excluded.items()) + "."
    return said


def _change(metric: str, change: Change | None) -> str:
    if change is None:
        return f"{METRIC_WORDS[metric]} not comparable"
    within = change.value and change.low <= 0 <= change.high
    return f"{METRIC_WORDS[metric]} {change.value:+.1%}" + (" (within noise)" if within else "")


def decision_key(basis: Basis, measured: Mapping[str, Evaluation]) -> str:
    """The digest of everything that a decision follows from."""
    return digest_of(
        {
            "version": DECISION_VERSION,
            "profile": basis.profile,
            "price": basis.price and basis.price.model_dump(mode="json"),
            "evaluations": {name: digest_of(each) for name, each in measured.items()},
            "excluded": sorted(basis.excluded),
        }
    )
