"""Select the winner of a run and publish it as a release.

Only evaluations that this run made or confirmed count. A variant that failed, or whose figures are missing or not
finite, cannot win. Publishing links files: it costs O(number of files), whatever the size of the model.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from scoring.names import PRODUCTION, variant_of
from scoring.profile import Profile
from stages.parts.base import program
from stages.parts.base.errors import DamagedModel, NoWinner
from stages.parts.base.files import Placement
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import being_served
from stages.parts.records.acquired import ACQUIRED, Acquired, difference
from stages.parts.records.answers import KeptAnswers, answers_key, answers_paths
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.production import RULES, Price, Production
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.pinned import alike
from stages.parts.releases.release import Place, current_release, decisions, publish, release_name, settle
from stages.parts.samples.lines import read_answers, read_samples
from stages.select.decision import decide, decision_key
from stages.select.stored import DECISION, Asked, Basis, store_inputs

ALLOWING: Final = Optimize(allow_incomplete=True)


class Selection(NamedTuple):
    reused: bool
    """Whether the same measurements led to this decision before."""
    decision: Production
    placement: Placement | None
    """How the files of the release were placed; None if they were there already."""


def select(
    store: ModelStore,
    profile: Profile,
    variants: list[str],
    *,
    optional: Collection[str] = (),
    price: Price | None = None,
    serve: bool = False,
    settings: Optimize = ALLOWING,
) -> Selection:
    """Decide and publish. What the decision follows from is stored in the run's folder, even if none can be chosen.

    Args:
        variants: of those among which one is chosen; and ``PRODUCTION``, if it is compared with what is in production.
        optional: the variants without which the decision is complete.
        price: of an hour of the hardware; without it no costs are computed.
        serve: a rollout follows, which will move ``production`` (see ``stages.parts.releases``).
        settings: whether a release waits for a person to roll it out if a variant is missing (``allow_incomplete``),
            and is published however it compares with what is in production (``force_publish``).

    Raises:
        DamagedModel: ``base/`` or the winner's files are not what their manifest says.
        NoWinner: no variant could be measured, or none can be chosen.
    """
    basis, measured = gather(store, profile, variants, price, optional)
    samples = {
        name: read_samples(store.evaluation(name).with_suffix(SAMPLES_SUFFIX), evaluation)
        for name, evaluation in measured.items()
    }
    run, asked = os.environ.get(program.RUN_VARIABLE), asked_only(store, basis, profile, measured)
    if run:
        store_inputs(store, store.run(run), basis, measured, asked)
    standing = standing_decision(store, decision_key(basis, measured, asked))
    decision, placement = standing or decide(basis, measured, samples, asked), None
    waits = decision.outcome == "incomplete" and not settings.allow_incomplete
    place: Place = "candidate" if serve or being_served(store) or waits else "production"
    if decision.standing and decision.promotion != "promoted" and settings.force_publish:
        forced = decision.standing.model_copy(update={"forced": True})
        decision = decision.model_copy(update={"standing": forced})
    if decision.promotion != "promoted" and not waits:
        place = "unpublished"
    if standing:
        settle(store, standing.release, place)
    else:
        digest = measured[decision.winner].variant_digest
        name = release_name(store, variant_of(decision.winner), digest, lambda release: alike(store, release, decision))
        decision = decision.model_copy(update={"release": name, "run": run})
        placement = publish(store, decision, place)
    if run:
        decision.write(store.run(run) / DECISION)
    return Selection(standing is not None, decision, placement)


def gather(
    store: ModelStore, profile: Profile, variants: list[str], price: Price | None = None, optional: Collection[str] = ()
) -> tuple[Basis, dict[str, Evaluation]]:
    """Gather what a decision between *variants* follows from: the basis, and the evaluations that count.

    Raises:
        DamagedModel: there is no complete ``base/``.
        NoWinner: no variant could be measured.
    """
    base = Acquired.read(store.base / ACQUIRED)
    if base is None:
        raise DamagedModel(f"{store.base} has no {ACQUIRED}", hint="run acquire first")
    measured, excluded, missing = measured_variants(store, base, variants)
    if not measured.keys() - {PRODUCTION}:
        raise NoWinner(
            "no variant could be measured: " + "; ".join(f"{name}: {why}" for name, why in excluded.items()),
            hint="see the log of each evaluation",
        )
    basis = Basis(
        base=base,
        profile=profile.model_dump(mode="json"),
        price=price,
        excluded=excluded,
        missing=tuple(name for name in missing if name not in (*optional, PRODUCTION)),
        production=(PRODUCTION in variants and current_release(store)) or "",
        rules=RULES,
        slipway=program.version(),
    )
    return basis, measured


def asked_only(store: ModelStore, basis: Basis, profile: Profile, measured: Mapping[str, Evaluation]) -> Asked | None:
    """Read the answers of a reference that was not measured; None if it was, or was not even asked."""
    reference = profile.reference_variant
    if not reference or reference in measured:
        return None
    key = answers_key(basis.base.digest, reference, next(iter(measured.values())).workload)
    record, samples = answers_paths(store, key)
    answers = KeptAnswers.read(record)
    return Asked(answers, read_answers(samples, key)) if answers else None


def tried(store: ModelStore, optimize: Optimize, published: str) -> list[str]:
    """List the variants without those that check said are not tried or, outside of a run, that *auto* has not made."""
    names, run = optimize.variants_of(published), os.environ.get(program.RUN_VARIABLE)
    untried = {name for name in names if optimize.is_automatic(name) and not store.optimized(name).exists()}
    if run:
        untried = {each.variant for each in program.outcomes(store.run(run)) if each.result == "not tried"}
    return [name for name in names if name not in untried]


def measured_variants(
    store: ModelStore, base: Acquired, variants: Iterable[str]
) -> tuple[dict[str, Evaluation], dict[str, str], tuple[str, ...]]:
    """Collect the evaluations that count, for every other variant the reason why it has none, and those of the others
    that could not be made or measured. A variant is not one of these if it was left out, because it can't be served
    here, or because it failed a gate before it was loaded."""
    run = os.environ.get(program.RUN_VARIABLE)
    ended = program.outcomes(store.run(run)) if run else []
    outcomes = {(outcome.stage, outcome.variant): outcome for outcome in ended}
    measured: dict[str, Evaluation] = {}
    excluded: dict[str, str] = {}
    missing = []
    for name in variants:
        variant = Variant.read(store.optimized(name) / VARIANT)
        evaluation = Evaluation.read(store.evaluation(name))
        places = ("check", variant_of(name)), ("check", name), ("evaluate", name)
        earlier = map(outcomes.get, places)
        left_out = next((outcome.reason for outcome in earlier if outcome and outcome.result == "left out"), "")
        if failed := left_out or (_failure(outcomes, name) if run else ""):
            excluded[name] = failed
        elif variant is None or (variant.base_digest != base.digest and variant_of(name) != PRODUCTION):
            excluded[name] = "was not made from this base"
        elif evaluation is None or evaluation.variant_digest != variant.digest:
            excluded[name] = "was not measured"
        elif run and outcomes["evaluate", name].key != evaluation.key:
            excluded[name] = "was measured by another run under other conditions"
        else:
            measured[name] = evaluation
        missing += [name] if name in excluded and not left_out else []
    return measured, excluded, tuple(missing)


def standing_decision(store: ModelStore, key: str) -> Production | None:
    """Find the decision with this key that is in production or waits for its rollout, if its release is complete."""
    for standing in decisions(store):
        variant = Variant.read(store.releases / standing.release / VARIANT)
        if standing.key == key and variant and not difference(store.releases / standing.release, variant.files):
            return standing
    return None


def _failure(outcomes: Mapping[tuple[str, str], program.Outcome], candidate: str) -> str:
    """Say why this run has no measurement of a candidate; empty if it has one."""
    made = [("optimize", variant_of(candidate))] if variant_of(candidate) != PRODUCTION else []
    for stage, name in (*made, ("evaluate", candidate)):
        outcome = outcomes.get((stage, name))
        if outcome is None:
            return f"{stage} did not finish"
        if outcome.result == "failed":
            return f"{stage} failed: {outcome.reason.splitlines()[0]}"
    return ""
