"""select: score what this run measured, publish the winner, and say why.

Only evaluations that this run made or confirmed count; a variant that failed, or whose numbers are missing
or not finite, cannot win. Publishing links files: it costs O(number of files), whatever the model's size.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from scoring.metrics import METRICS
from scoring.profile import Profile
from stages import program, score_table
from stages.errors import DamagedModel, NoWinner
from stages.evidence import (
    Lines,
    changes,
    cost_of,
    draws,
    intervals,
    items_of,
    limited,
    notes_of,
    paired,
    read_samples,
)
from stages.fidelity import divergences, fidelity_limits, recovery
from stages.hub import model_id
from stages.kept import DECISION, Basis, keep
from stages.records import (
    ACQUIRED,
    VARIANT,
    Acquired,
    Candidate,
    Evaluation,
    Paired,
    Price,
    Production,
    Variant,
    difference,
)
from stages.releases import current_release, decisions, publish, release_name, settle
from stages.settings import parse, parse_json
from stages.store import ModelStore, digest_of, store_root

if TYPE_CHECKING:
    import pandas as pd

    from scoring.decide import Decision

DECISION_VERSION: Final = 4
"""Raised when the same measurements would be scored another way, so that old decisions are not reused."""
REFERENCE: Final = "fp16"
METRIC_WORDS: Final = {"quality": "quality", "latency": "p95 latency", "throughput": "throughput", "memory": "memory"}


def main() -> None:
    arguments = _arguments()
    store = ModelStore(store_root(), model_id(arguments.model))
    profile = parse_json(Profile, arguments.profile, "--profile")
    price = parse_json(Price, arguments.price, "--price") if arguments.price else None
    with program.outcome(store, "select") as report:
        serve = arguments.serve == "true"
        reused, decision, placement = select(store, profile, arguments.variants.split(","), price=price, serve=serve)
        if reused:
            where = "in production" if current_release(store) == decision.release else "published"
            report.reused(f"{decision.winner} is {where} already, by the same measurements", key=decision.key)
        else:
            report.done(f"{decision.reason} Published as {decision.release} ({placement}).", key=decision.key)
    program.write_output("winner", decision.winner)
    program.write_output("release", decision.release)
    program.write_output("reason", decision.reason)
    program.write_output("table", score_table.markdown(decision))
    print(decision.reason)


def select(
    store: ModelStore, profile: Profile, variants: list[str], *, price: Price | None = None, serve: bool = False
) -> tuple[bool, Production, str]:
    """Decide and publish. What was decided by is kept in the run's folder, also if nobody can be chosen.

    Args:
        price: of an hour of the hardware; None: costs are not told.
        serve: a rollout follows, and it is that which moves ``production`` (see ``stages.releases``).

    Returns:
        Whether the decision stood already, the decision, and how files were placed.

    Raises:
        DamagedModel: ``base/`` or the winner's files are not what their manifest says.
        NoWinner: not one variant could be measured.
    """
    base = Acquired.read(store.base / ACQUIRED)
    if base is None:
        raise DamagedModel(f"{store.base} has no {ACQUIRED}", hint="run acquire first")
    measured, excluded = gather(store, base, variants)
    if not measured:
        raise NoWinner(
            "no variant could be measured: " + "; ".join(f"{name}: {why}" for name, why in excluded.items()),
            hint="see the log of each evaluation",
        )
    basis = Basis(base=base, profile=profile.model_dump(mode="json"), price=price, excluded=excluded)
    lines = {name: read_samples(store, each) for name, each in measured.items()}
    run = os.environ.get(program.RUN_VARIABLE)
    if run:
        keep(store, store.run(run), basis, measured)
    decision = standing_decision(store, decision_key(basis, measured))
    if reused := decision is not None:
        settle(store, decision.release, serve=serve)
        placement = "hardlink"
    else:
        found = decide(basis, measured, lines)
        winner = measured[found.winner]
        release = release_name(store, winner.variant, winner.variant_digest)
        decision = found.model_copy(update={"run": run, "release": release})
        placement = publish(store, decision, serve=serve)
    if run:
        decision.write(store.run(run) / DECISION)
    return reused, decision, placement


def gather(store: ModelStore, base: Acquired, variants: Iterable[str]) -> tuple[dict[str, Evaluation], dict[str, str]]:
    """The evaluations that count, and for every other variant the reason why it doesn't."""
    outcomes = _outcomes_of_this_run(store)
    measured: dict[str, Evaluation] = {}
    excluded: dict[str, str] = {}
    for name in variants:
        variant = Variant.read(store.optimized(name) / VARIANT)
        evaluation = Evaluation.read(store.evaluation(name))
        failed = _failure(outcomes, name)
        if failed:
            excluded[name] = failed
        elif variant is None or variant.base_digest != base.digest:
            excluded[name] = "was not made from this base"
        elif evaluation is None or evaluation.variant_digest != variant.digest:
            excluded[name] = "was not measured"
        elif outcomes is not None and outcomes[f"evaluate-{name}"].key != evaluation.key:
            excluded[name] = "was measured by another run under other conditions"
        else:
            measured[name] = evaluation
    return measured, excluded


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


def standing_decision(store: ModelStore, key: str) -> Production | None:
    """The decision of *key* that is in production or waits for its rollout, if its release is whole."""
    for standing in decisions(store):
        variant = Variant.read(store.releases / standing.release / VARIANT)
        if standing.key == key and variant and not difference(store.releases / standing.release, variant.files):
            return standing
    return None


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


def _outcomes_of_this_run(store: ModelStore) -> dict[str, program.Outcome] | None:
    run_id = os.environ.get(program.RUN_VARIABLE)
    if not run_id:
        return None
    return {f"{each.stage}-{each.variant}": each for each in program.outcomes(store.run(run_id))}


def _failure(outcomes: dict[str, program.Outcome] | None, variant: str) -> str | None:
    """Why this run has no measurement of *variant*, or None if it has one (or there is no run to ask)."""
    if outcomes is None:
        return None
    for stage in ("optimize", "evaluate"):
        each = outcomes.get(f"{stage}-{variant}")
        if each is None:
            return f"{stage} did not finish"
        if each.result == "failed":
            return f"{stage} failed: {each.reason.splitlines()[0]}"
    return None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stages.select",
        description="Score the measured variants and publish the winner.",
        epilog='example: python -m stages.select --model org/name --profile \'{"name": "balanced"}\'',
    )
    parser.add_argument("--model", required=True, help="name on the Hub, or a local directory")
    parser.add_argument("--profile", required=True, help="the scoring profile as JSON")
    parser.add_argument("--price", default="", help="of an hour of the hardware as JSON; without it no costs are told")
    parser.add_argument("--variants", default="fp16,awq,gptq", help="which to choose from (default: %(default)s)")
    parser.add_argument(
        "--serve", choices=["true", "false"], default="false", help="true: a rollout follows, and promotes the winner"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(program.main(main))
