"""The decision as a document, made from measurements alone: scores, winner, and why in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from scoring.metrics import METRICS
from scoring.profile import Profile
from stages.parts.base.errors import NoWinner
from stages.parts.base.settings import parse
from stages.parts.base.store import digest_of
from stages.parts.records.evaluation import Evaluation, by_machine, machine_of
from stages.parts.records.production import Candidate, Change, Margin, Paired, Production, divergence_measures
from stages.parts.samples.lines import Samples
from stages.select.evidence import changes, cost_of, different_questions, draws, intervals, paired, questions
from stages.select.fidelity import divergence_draws, divergences, recorded, recovery
from stages.select.kept import Basis
from stages.select.notes import SPEED, notes_of

if TYPE_CHECKING:
    from scoring.decide import Decision

DECISION_VERSION: Final = 5
"""Raised when the same measurements would be scored another way, so that old decisions are not reused."""
REFERENCE: Final = "fp16"
METRIC_WORDS: Final = {"quality": "quality", "latency": "p95 latency", "throughput": "throughput", "memory": "memory"}


def decide(basis: Basis, measured: Mapping[str, Evaluation], samples: Mapping[str, Samples]) -> Production:
    """The whole decision as a document, but for where it is published: ``run`` and ``release``. Reads and writes
    nothing, and comes to the same whenever it is made from the same.

    Raises:
        NoWinner: every variant lacks a metric, or breaks a constraint.
        DamagedModel: raw samples are not what was written.
    """
    import pandas as pd

    from scoring import decide as scoring
    from scoring.pareto import pareto_front

    base, profile = basis.base, parse(Profile, basis.profile, "the profile")
    measured = dict(sorted(measured.items()))
    raw = pd.DataFrame.from_dict({name: each.metrics() for name, each in measured.items()}, orient="index")
    diverged = divergences(samples, REFERENCE)
    apart = {name: recorded(each) for name, each in diverged.items()}
    limits = {
        name: each.measures() | divergence_measures(apart.get(name), is_reference=name == REFERENCE)
        for name, each in measured.items()
    }
    drawn = {
        name: {**each, **(divergence_draws(diverged[name]) if name in diverged else {})}
        for name, each in draws(measured, samples, profile.constraints.limits()).items()
    }
    incomparable = SPEED if len(by_machine(measured)) > 1 else ()
    digests = {name: each.variant_digest for name, each in measured.items()}
    found = scoring.decide(raw, profile, drawn, limits, digests=digests, incomparable=incomparable)
    excluded = basis.excluded | {name: "; ".join(reasons) for name, reasons in found.excluded.items()}
    if found.winner is None:
        raise NoWinner(found.verdict, hint="see the evaluations, or choose another profile")
    items = questions(measured, samples)
    front = pareto_front(raw.loc[list(found.eligible)].assign(**dict.fromkeys(incomparable, 0.0)))
    differences = {
        name: paired(items[REFERENCE], each) if REFERENCE in items and name != REFERENCE else ()
        for name, each in items.items()
    }
    candidates = [
        candidate(measured[name], found, pareto=bool(front[name]), against_fp16=differences[name])
        for name in found.eligible
    ]
    candidates += [left_out(name, why, measured.get(name)) for name, why in excluded.items()]
    metrics = {name: each.metrics() for name, each in measured.items()}
    reach = {name: intervals(each, drawn[name]) for name, each in metrics.items()}
    moved = {
        name: {
            metric: change
            for metric, change in changes(each, metrics[REFERENCE], drawn[name], drawn[REFERENCE]).items()
            if metric not in SPEED or machine_of(measured[name]) == machine_of(measured[REFERENCE])
        }
        for name, each in metrics.items()
        if REFERENCE in metrics and name != REFERENCE
    }
    costs = {name: cost_of(each, basis.price, drawn[name]) for name, each in measured.items()}
    winner = measured[found.winner]
    return Production(
        model=base.model,
        commit=base.commit,
        license=base.license,
        base_digest=base.digest,
        run=None,
        winner=winner.variant,
        release="",
        reason=in_words(found, moved.get(found.winner), excluded),
        notes=(*found.near_limits, *notes_of(measured, basis.price), *different_questions(items)),
        separated=found.separated,
        margin=Margin.model_validate(vars(found.margin)) if found.margin else None,
        profile=profile.model_dump(mode="json"),
        weights=profile.weights.shares(),
        noise=found.noise,
        units={name: metric.unit for name, metric in METRICS.items()},
        price=basis.price,
        candidates=tuple(
            each.model_copy(
                update={
                    "cost": costs.get(each.variant),
                    "intervals": reach.get(each.variant, {}),
                    "change": moved.get(each.variant, {}),
                    "recovery": recovery(measured.get(each.variant), measured.get(REFERENCE)),
                    "divergence": apart.get(each.variant),
                }
            )
            for each in candidates
        ),
        workload=winner.workload,
        engine=winner.engine,
        hardware=winner.hardware,
        key=decision_key(basis, measured),
        decided_at=datetime.now(UTC),
    )


def candidate(evaluation: Evaluation, found: Decision, *, pareto: bool, against_fp16: tuple[Paired, ...]) -> Candidate:
    """A variant that could win."""
    name = evaluation.variant
    row = found.ranking.loc[name].astype(float).to_dict()
    low, high = found.score_interval[name]
    return Candidate(
        variant=name,
        digest=evaluation.variant_digest,
        evaluation_key=evaluation.key,
        evaluation_digest=digest_of(evaluation),
        excluded=None,
        raw=evaluation.metrics(),
        normalized={metric: row[metric] for metric in METRICS},
        score=row["score"],
        score_low=low,
        score_high=high,
        win_probability=found.win_probability[name],
        weights_share=found.near_weights[name],
        any_weights_share=found.any_weights[name],
        pareto=pareto,
        against_fp16=against_fp16,
        cost=None,
    )


def left_out(name: str, why: str, evaluation: Evaluation | None) -> Candidate:
    """A variant that could not win, with what was measured of it."""
    metrics = evaluation.metrics() if evaluation else {}
    return Candidate(
        variant=name,
        digest=evaluation.variant_digest if evaluation else None,
        evaluation_key=evaluation.key if evaluation else None,
        evaluation_digest=digest_of(evaluation) if evaluation else None,
        excluded=why,
        raw={metric: value for metric, value in metrics.items() if math.isfinite(value)},
        normalized={},
        score=None,
        score_low=None,
        score_high=None,
        win_probability=None,
        weights_share=None,
        pareto=None,
        against_fp16=(),
        cost=None,
    )


def in_words(found: Decision, moved: Mapping[str, Change] | None, excluded: Mapping[str, str]) -> str:
    """Why the winner won, in sentences that agree with its numbers.

    Args:
        moved: the winner's metrics beside the reference's; None where it is the reference, or that was not measured.
    """
    said = found.verdict
    if moved is not None:
        said += f" Against {REFERENCE}: {', '.join(_change(name, moved.get(name)) for name in METRICS)}."
    if excluded:
        said += " Out: " + "; ".join(f"{name}: {why}" for name, why in excluded.items()) + "."
    return said


def _change(metric: str, change: Change | None) -> str:
    if change is None:
        return f"{METRIC_WORDS[metric]} not comparable"
    within = change.value and change.low <= 0 <= change.high
    return f"{METRIC_WORDS[metric]} {change.value:+.1%}" + (" (within noise)" if within else "")


def decision_key(basis: Basis, measured: Mapping[str, Evaluation]) -> str:
    return digest_of(
        {
            "version": DECISION_VERSION,
            "profile": basis.profile,
            "price": basis.price and basis.price.model_dump(mode="json"),
            "evaluations": {name: digest_of(each) for name, each in measured.items()},
            "excluded": sorted(basis.excluded),
        }
    )
