"""select: score what this run measured, publish the winner, and say why.

Only evaluations that this run made or confirmed count; a variant that failed, or whose numbers are missing
or not finite, cannot win. Publishing links files: it costs O(number of files), whatever the model's size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scoring.metrics import METRICS
from scoring.profile import Profile
from stages import program
from stages.errors import DamagedModel, NoWinner
from stages.evidence import draws, items_of, limited, paired, read_samples
from stages.hub import model_id
from stages.records import ACQUIRED, VARIANT, Acquired, Candidate, Evaluation, Paired, Production, Variant, difference
from stages.settings import parse
from stages.store import ModelStore, digest_of, place_tree, store_root, swap_link

if TYPE_CHECKING:
    import pandas as pd

    from scoring.decide import Decision

RELEASE: Final = re.compile(r"^(\d{4,})-(.+)-([0-9a-f]{12})$")
DECISION_VERSION: Final = 2
"""Raised when the same measurements would be scored another way, so that old decisions are not reused."""
REFERENCE: Final = "fp16"
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
            "profile": profile.model_dump(mode="json"),
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
        NoWinner: every variant lacks a metric, or breaks a constraint.
        DamagedModel: raw samples are missing.
    """
    import pandas as pd

    from scoring import decide as scoring
    from scoring.pareto import pareto_front

    raw = pd.DataFrame.from_dict({name: each.metrics() for name, each in measured.items()}, orient="index")
    lines = {name: read_samples(store, each) for name, each in measured.items()}
    limits = {name: limited(each) for name, each in measured.items()}
    found = scoring.decide(raw, profile, draws(measured, lines), limits)
    excluded = excluded | {name: "; ".join(reasons) for name, reasons in found.excluded.items()}
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
    winner = measured[found.winner]
    return Production(
        model=base.model,
        commit=base.commit,
        license=base.license,
        base_digest=base.digest,
        run=os.environ.get(program.RUN_VARIABLE),
        winner=winner.variant,
        release=release_name(store, winner),
        reason=in_words(found, raw, excluded),
        separated=found.separated,
        profile=profile.model_dump(mode="json"),
        weights=profile.weights.shares(),
        noise=found.noise,
        units={name: metric.unit for name, metric in METRICS.items()},
        candidates=(*candidates, *(left_out(name, why, measured.get(name)) for name, why in excluded.items())),
        workload=winner.workload,
        engine=winner.engine,
        hardware=winner.hardware,
        key=key,
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
    )


def left_out(name: str, why: str, evaluation: Evaluation | None) -> Candidate:
    """A variant that could not win, with what was measured of it."""
    metrics = evaluation.metrics() if evaluation else {}
    return Candidate(
        variant=name,
        digest=evaluation.variant_digest if evaluation else None,
        evaluation_key=evaluation.key if evaluation else None,
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
