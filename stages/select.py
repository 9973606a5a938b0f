"""select: score what this run measured, publish the winner, and say why.

Only evaluations that this run made or confirmed count; a variant that failed, or whose numbers are missing
or not finite, cannot win. Publishing links files: it costs O(number of files), whatever the model's size.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from scoring.metrics import METRICS
from scoring.profile import Profile
from stages import program
from stages.errors import DamagedModel, NoWinner
from stages.hub import model_id
from stages.records import ACQUIRED, VARIANT, Acquired, Candidate, Evaluation, Production, Variant, difference
from stages.settings import parse
from stages.store import ModelStore, digest_of, place_tree, store_root, swap_link

RELEASE: Final = re.compile(r"^(\d{4,})-(.+)-([0-9a-f]{12})$")
DECISION_VERSION: Final = 1
"""Raised when the same measurements would be scored another way, so that old decisions are not reused."""
METRIC_WORDS: Final = {"quality": "quality", "latency": "p95 latency", "throughput": "throughput", "memory": "memory"}


def main() -> None:
    arguments = _arguments()
    store = ModelStore(store_root(), model_id(arguments.model))
    profile = parse(Profile, json.loads(arguments.profile), "--profile")
    with program.outcome(store, "select") as report:
        reused, decision, placement = select(store, profile, arguments.variants.split(","))
        if reused:
            report.reused(f"{decision.winner} is in production already, by the same measurements", key=decision.key)
        else:
            report.done(f"{decision.reason} Published as {decision.release} ({placement}).", key=decision.key)
    program.write_output("winner", decision.winner)
    program.write_output("release", decision.release)
    program.write_output("reason", decision.reason)
    print(decision.reason)


def select(store: ModelStore, profile: Profile, variants: list[str]) -> tuple[bool, Production, str]:
    """Decide and publish.

    Returns:
        Whether the decision was in production already, the decision, and how files were placed.

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
    key = decision_key(profile, measured, excluded)
    standing = standing_decision(store, key)
    if standing is not None:
        return True, standing, "hardlink"
    decision = decide(store, base, profile, measured, excluded, key)
    return False, decision, publish(store, decision)


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


def decision_key(profile: Profile, measured: dict[str, Evaluation], excluded: dict[str, str]) -> str:
    return digest_of(
        {
            "version": DECISION_VERSION,
            "shares": profile.weights.shares(),
            "profile": profile.name,
            "evaluations": {name: [each.key, each.metrics()] for name, each in measured.items()},
            "excluded": sorted(excluded),
        }
    )


def standing_decision(store: ModelStore, key: str) -> Production | None:
    """The decision in production, if it has *key* and its release is whole and linked."""
    standing = Production.read(store.production_metrics)
    if standing is None or standing.key != key or current_release(store) != standing.release:
        return None
    variant = Variant.read(store.releases / standing.release / VARIANT)
    return standing if variant and not difference(store.releases / standing.release, variant.files) else None


def decide(
    store: ModelStore,
    base: Acquired,
    profile: Profile,
    measured: dict[str, Evaluation],
    excluded: dict[str, str],
    key: str,
) -> Production:
    """The whole decision as a document; writes nothing.

    Raises:
        NoWinner: every variant lacks a finite metric.
    """
    import pandas as pd

    from scoring.score import rank

    raw = pd.DataFrame.from_dict({name: each.metrics() for name, each in measured.items()}, orient="index")
    ranking = rank(raw, profile.weights.shares())
    unmeasured = {name: "a metric is missing or not finite" for name in measured if name not in ranking.index}
    excluded = excluded | unmeasured
    if ranking.empty:
        raise NoWinner("no variant has all four metrics: " + ", ".join(excluded), hint="see the evaluations")
    candidates = [
        Candidate(
            variant=str(name),
            digest=measured[str(name)].variant_digest,
            evaluation_key=measured[str(name)].key,
            excluded=None,
            raw=measured[str(name)].metrics(),
            normalized={metric: float(row[metric]) for metric in METRICS},
            score=float(row["score"]),
        )
        for name, row in ranking.iterrows()
    ] + [
        Candidate(variant=name, digest=None, evaluation_key=None, excluded=why, raw={}, normalized={}, score=None)
        for name, why in excluded.items()
    ]
    winner = measured[candidates[0].variant]
    return Production(
        model=base.model,
        commit=base.commit,
        license=base.license,
        base_digest=base.digest,
        run=os.environ.get(program.RUN_VARIABLE),
        winner=winner.variant,
        release=release_name(store, winner),
        reason=in_words(candidates),
        profile=profile.name,
        weights=profile.weights.shares(),
        units={name: metric.unit for name, metric in METRICS.items()},
        candidates=tuple(candidates),
        workload=winner.workload,
        engine=winner.engine,
        hardware=winner.hardware,
        key=key,
        decided_at=datetime.now(UTC),
    )


def in_words(candidates: list[Candidate]) -> str:
    """Why the first of *candidates* won, in one or two sentences that agree with its numbers."""
    first, *others = candidates
    rivals = [each for each in others if each.excluded is None]
    lost = "; ".join(f"{each.variant}: {each.excluded}" for each in others if each.excluded)
    if not rivals:
        why = f" ({lost})" if lost else ""
        return f"{first.variant} wins as the only variant that could be measured{why}."
    second = rivals[0]
    assert first.score is not None and second.score is not None  # noqa: S101, PT018 - ranked, so scored
    best = [METRIC_WORDS[name] for name, value in first.normalized.items() if value == 1.0]
    strengths = f", best in {_listed(best)}" if best else ""
    margin = first.score - second.score
    lead = f"{margin:.3f} ahead of {second.variant}" if margin else f"level with {second.variant}, by the tie rule"
    sentence = f"{first.variant} wins with a score of {first.score:.3f}, {lead}{strengths}"
    reference = next((each for each in rivals if each.variant == "fp16"), None)
    if reference:
        changes = [
            f"{METRIC_WORDS[name]} {change:+.1%}"
            for name in METRIC_WORDS
            if (change := _change(first.raw[name], reference.raw[name])) is not None
        ]
        sentence += f"; against fp16: {', '.join(changes)}"
    return sentence + "." + (f" Not in the running: {lost}." if lost else "")


def publish(store: ModelStore, decision: Production) -> str:
    """Make the release, then its reasons, then the link: each atomic, so a crash leaves the old one serving."""
    variant_dir = store.optimized(decision.winner)
    variant = Variant.read(variant_dir / VARIANT)
    wrong = difference(variant_dir, variant.files) if variant else f"{VARIANT} is missing"
    if variant is None or wrong:
        raise DamagedModel(f"{variant_dir} is damaged: {wrong}", hint="run again: it is made anew")
    release = store.releases / decision.release
    placement = "hardlink"
    if not release.exists():
        with store.building(release) as work:
            placement = place_tree(variant_dir, work, [each.path for each in variant.files])
            variant.write(work / VARIANT)
            decision.write(work / store.production_metrics.name)
    decision.write(store.production_metrics)
    swap_link(store.production, Path("releases") / decision.release)
    return placement


def current_release(store: ModelStore) -> str | None:
    """The name of the release that ``production`` points to."""
    return store.production.readlink().name if store.production.is_symlink() else None


def release_name(store: ModelStore, winner: Evaluation) -> str:
    """The newest release if it holds the winner already (also after a crash while publishing), else a new number.

    Numbers only grow and are never used again, also after a rollback.
    """
    suffix = f"{winner.variant}-{winner.variant_digest[:12]}"
    numbered = {int(match[1]): match[0] for path in store.releases.glob("*") if (match := RELEASE.match(path.name))}
    newest = max(numbered, default=0)
    if newest and numbered[newest].partition("-")[2] == suffix:
        return numbered[newest]
    return f"{newest + 1:04d}-{suffix}"


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


def _change(value: float, reference: float) -> float | None:
    return value / reference - 1 if reference else None


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stages.select",
        description="Score the measured variants and publish the winner.",
        epilog='example: python -m stages.select --model org/name --profile \'{"name": "balanced"}\'',
    )
    parser.add_argument("--model", required=True, help="name on the Hub, or a local directory")
    parser.add_argument("--profile", required=True, help="the scoring profile as JSON")
    parser.add_argument("--variants", default="fp16,awq,gptq", help="which to choose from (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(program.main(main))
