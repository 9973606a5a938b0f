"""Which measurements count, what is decided by them, and its release.

Only evaluations that this run made or confirmed count; a variant that failed, or whose numbers are missing
or not finite, cannot win. Publishing links files: it costs O(number of files), whatever the model's size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from scoring.profile import Profile
from stages.parts.base import program
from stages.parts.base.errors import DamagedModel, NoWinner
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.record import being_served
from stages.parts.records.acquired import ACQUIRED, Acquired, difference
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.production import Price, Production
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.release import decisions, publish, release_name, settle
from stages.parts.samples.lines import read_samples
from stages.select.decision import decide, decision_key
from stages.select.kept import DECISION, Basis, keep


def select(
    store: ModelStore, profile: Profile, variants: list[str], *, price: Price | None = None, serve: bool = False
) -> tuple[bool, Production, str]:
    """Decide and publish. What was decided by is kept in the run's folder, also if nobody can be chosen.

    Args:
        price: of an hour of the hardware; None: costs are not told.
        serve: a rollout follows, and it is that which moves ``production`` (see ``stages.parts.releases``).

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
    samples = {
        name: read_samples(store.evaluation(name).with_suffix(SAMPLES_SUFFIX), each) for name, each in measured.items()
    }
    run = os.environ.get(program.RUN_VARIABLE)
    if run:
        keep(store, store.run(run), basis, measured)
    decision = standing_decision(store, decision_key(basis, measured))
    wait = serve or being_served(store)
    if reused := decision is not None:
        settle(store, decision.release, wait=wait)
        placement = "hardlink"
    else:
        found = decide(basis, measured, samples)
        winner = measured[found.winner]
        release = release_name(store, winner.variant, winner.variant_digest)
        decision = found.model_copy(update={"run": run, "release": release})
        placement = publish(store, decision, wait=wait)
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


def standing_decision(store: ModelStore, key: str) -> Production | None:
    """The decision of *key* that is in production or waits for its rollout, if its release is whole."""
    for standing in decisions(store):
        variant = Variant.read(store.releases / standing.release / VARIANT)
        if standing.key == key and variant and not difference(store.releases / standing.release, variant.files):
            return standing
    return None


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
