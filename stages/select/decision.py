"""The decision as a document, made from measurements alone: scores, winner, and why in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from scoring.metrics import METRICS
from scoring.profile import Profile
from stages.errors import NoWinner
from stages.records import Candidate, Evaluation, Paired, Production
from stages.select.evidence import Lines, changes, cost_of, draws, intervals, items_of, limited, notes_of, paired
from stages.select.fidelity import divergences, fidelity_limits, recovery
from stages.select.kept import Basis
from stages.settings import parse
from stages.store import digest_of

if TYPE_CHECKING:
    import pandas as pd

    from scoring.decide import Decision

DECISION_VERSION: Final = 4
"""Raised when the same measurements would be scored another way, so that old decisions are not reused."""
REFERENCE: Final = "fp16"
METRIC_WORDS: Final = {"quality": "quality", "latency": "p95 latency", "throughput": "throughput", "memory": "memory"}


def decide(basis: Basis, measured: Mapping[str, Evaluation], lines: Mapping[str, Lines]) -> Production:
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
    apart = divergences(measured, lines, REFERENCE)
    limits = {name: limited(each) | fidelity_limits(name, REFERENCE, apart) for name, each in measured.items()}
    drawn = draws(measured, lines)
    digests = {name: each.variant_digest for name, each in measured.items()}
    found = scoring.decide(raw, profile, drawn, limits, digests=digests)
    excluded = basis.excluded | {name: "; ".join(reasons) for name, reasons in found.excluded.items()}
    if found.winner is None:
        raise NoWinner(found.verdict, hint="see the evaluations, or choose another profile")
    items = {name: items_of(lines[name], each) for name, each in measured.items()}
    front = pareto_front(raw)
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
        name: changes(each, metrics[REFERENCE], drawn[name], drawn[REFERENCE])
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
        reason=in_words(found, raw, excluded),
        notes=notes_of(measured),
        separated=found.separated,
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


def in_words(found: Decision, raw: pd.DataFrame, excluded: Mapping[str, str]) -> str:
    """Why the winner won, in sentences that agree with its numbers."""
    said = found.verdict
    if found.winner and found.winner != REFERENCE and REFERENCE in raw.index:
        winner, reference = raw.loc[found.winner].to_dict(), raw.loc[REFERENCE].to_dict()
        changes = [_change(name, winner[name], reference[name], found.noise) for name in METRICS]
        said += f" Against {REFERENCE}: {', '.join(changes)}."
    if excluded:
        said += " Out: " + "; ".join(f"{name}: {why}" for name, why in excluded.items()) + "."
    return said


def _change(metric: str, value: float, reference: float, noise: Mapping[str, float]) -> str:
    change = f"{value / reference - 1:+.1%}" if reference else "not comparable"
    within = 0 < abs(value - reference) <= noise.get(metric, 0.0)
    return f"{METRIC_WORDS[metric]} {change}" + (" (within noise)" if within else "")


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
