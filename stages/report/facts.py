"""What the report says of a run, made ready for the page: figures with their intervals, marks for ✓ and ✗, plots."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from scoring.constraints import MEASURES, Constraints
from scoring.metrics import METRICS, odds, shown, si, span
from stages.parts.base.settings import Workload
from stages.parts.records.evaluation import Evaluation, Percentiles, by_machine
from stages.parts.records.production import Candidate, Change, Production
from stages.parts.samples.figures import fidelity_limits, limited
from stages.report import plots

if TYPE_CHECKING:
    from stages.report.record import RunReport

REFERENCE: Final = "fp16"
TITLES: Final = {"quality": "Quality", "latency": "p95 latency", "throughput": "Throughput", "memory": "Weights"}
SCALES: Final = {"latency": (1.0, "ms"), "throughput": (1.0, "tokens/s"), "quality": (1.0, "")}
SETTINGS_FILE: Final = "settings.yaml"
DIGESTS: Final = {"tasks_path": "tasks_digest", "trace": "trace_digest", "divergence_text": "divergence_digest"}
"""Files of a workload, by what an evaluation keeps of them."""


@dataclass(frozen=True)
class Tile:
    """One figure of the first screen."""

    title: str
    value: str
    change: str
    """Beside fp16, with its interval, or why there is none."""
    verdict: str
    """better, worse, level or empty."""


@dataclass(frozen=True)
class Kept:
    """One variant under one constraint."""

    value: str
    kept: bool | None
    """None: not measured."""


@dataclass(frozen=True)
class Limit:
    name: str
    meaning: str
    bound: str
    by_variant: dict[str, Kept]


def sentences(reason: str) -> tuple[str, str]:
    """The decision's reason: who and how sure, and the rest (beside fp16, who is out)."""
    found = re.search(r" (?=Against fp16: |Out: )", reason)
    return (reason[: found.start()], reason[found.end() :]) if found else (reason, "")


def confidence(decision: Production) -> str:
    """How sure the choice is, in a few words."""
    winner = winner_of(decision)
    able = [each for each in decision.candidates if not each.excluded]
    if winner.win_probability is None or (len(able) < 2 and decision.separated):
        return "the only one that could be chosen"
    if len(able) < 2:
        return f"the only one that could be chosen: would be again with a probability of {odds(winner.win_probability)}"
    said = f"scores highest again with a probability of {odds(winner.win_probability)}"
    return f"clear: {said}" if decision.separated else f"not separated from the others: {said}"


def lead(decision: Production) -> str:
    """By how much the winner's score exceeds the next one, and under which other weightings it is first; empty where
    nobody else could be chosen."""
    winner, margin = winner_of(decision), decision.margin
    if margin is None:
        return ""
    value, low, high = (f"{each:+.3f}".replace("-", "−") for each in (margin.value, margin.low, margin.high))
    said = f"Score beside {margin.over}’s: {value} (95 %: {low} to {high})."
    if winner.weights_share is not None and winner.any_weights_share is not None:
        near, anywhere = f"{100 * winner.weights_share:.0f} %", f"{100 * winner.any_weights_share:.0f} %"
        said += f" First under {near} of the weightings near the profile’s, {anywhere} of all."
    return said


def winner_of(decision: Production) -> Candidate:
    return next(each for each in decision.candidates if each.variant == decision.winner)


def tiles(decision: Production) -> list[Tile]:
    """The winner's four metrics, and its cost where there is a price."""
    winner = winner_of(decision)
    nothing = "what others are compared with" if decision.winner == REFERENCE else "no fp16 to compare with"
    nothing = "not comparable with fp16" if winner.change else nothing
    found = []
    for name, title in TITLES.items():
        change = winner.change.get(name)
        value = shown(name, winner.raw[name]) if name in winner.raw else "–"
        beside = " ".join(changed(change)) if change else nothing
        found.append(Tile(title, value, beside, verdict(name, change)))
    if winner.cost:
        cost = winner.cost
        reach = f"{span(cost.low, cost.high)}, at the {cost.basis}"
        found.append(Tile("Million output tokens", f"{cost.value:.3g} {cost.currency}", reach, ""))
    return found


def changed(change: Change | None) -> tuple[str, str]:
    """A change in percent, and its interval; both empty where there is none."""
    if change is None:
        return "", ""
    value, low, high = (f"{100 * each:+.1f}".replace("-", "−") for each in (change.value, change.low, change.high))
    return f"{value} %", "" if change.low == change.high else f"({low} to {high})"


def verdict(metric: str, change: Change | None) -> str:
    """Whether a change is for the better as far as its interval tells."""
    if change is None:
        return ""
    if change.low <= 0 <= change.high:
        return "level"
    return "better" if (change.low > 0) == METRICS[metric].higher_is_better else "worse"


def interval(candidate: Candidate, metric: str) -> str:
    """As '0.36–0.41', in the metric's unit; empty where none is recorded."""
    found = candidate.intervals.get(metric)
    if found is None:
        return ""
    digits = {"quality": 3, "latency": 0 if found.high >= 100 else 1, "throughput": 0 if found.high >= 100 else 1}
    return f"{found.low:,.{digits.get(metric, 1)}f}–{found.high:,.{digits.get(metric, 1)}f}"


def percentiles(each: Percentiles) -> str:
    digits = 1 if each.p99 < 1000 else 0
    return " / ".join(f"{value:,.{digits}f}" for value in (each.p50, each.p95, each.p99))


def styles(names: Sequence[str]) -> dict[str, int]:
    """A color and mark for each variant, the same in every plot: 0 is fp16's, wherever it ranks."""
    others = sorted(set(names) - {REFERENCE})
    return {REFERENCE: 0} | {name: 1 + number % (plots.STYLES - 1) for number, name in enumerate(others)}


def constraints(decision: Production, evaluations: Mapping[str, Evaluation]) -> list[Limit]:
    """The profile's limits, and what each variant that was measured makes of them."""
    limits = Constraints.model_validate(decision.profile.get("constraints", {})).limits()
    candidates = [each for each in decision.candidates if each.raw]
    whole = {each.variant: each.raw.get("quality") for each in candidates}.get(REFERENCE)
    values = {each.variant: _measures(each, whole, evaluations.get(each.variant)) for each in candidates}
    found = []
    for name, limit in limits.items():
        least = MEASURES[name].higher_is_better
        bound = f"{'≥' if least else '≤'} {limit:g}"
        by_variant = {
            variant: _kept(each.get(name), limit, least, absent=evaluations.get(variant) is None)
            for variant, each in values.items()
        }
        found.append(Limit(name, f"{MEASURES[name].meaning}, {MEASURES[name].unit}", bound, by_variant))
    return found


def _measures(candidate: Candidate, whole: float | None, evaluation: Evaluation | None) -> dict[str, float | None]:
    apart = {candidate.variant: candidate.divergence} if candidate.divergence else {}
    quality, memory = candidate.raw.get("quality"), candidate.raw.get("memory")
    return {
        **(limited(evaluation) if evaluation else {}),
        **fidelity_limits(candidate.variant, REFERENCE, apart),
        "quality_recovery": quality / whole if quality is not None and whole else None,
        "memory_gib": memory / 2**30 if memory is not None else None,
        "e2el_p95_ms": candidate.raw.get("latency"),
    }


def _kept(value: float | None, limit: float, least: bool, *, absent: bool) -> Kept:
    """What was not measured keeps nothing; but of an evaluation that can't be read nothing is claimed."""
    if value is None:
        return Kept("–" if absent else "not measured", None if absent else False)
    return Kept(f"{value:.4g}", value >= limit if least else value <= limit)


def score_plot(decision: Production, *, narrow: bool = False) -> Markup | None:
    """None where no variant has a score. *narrow*: for a small screen."""
    able = [each for each in decision.candidates if each.score is not None]
    looks = styles([each.variant for each in decision.candidates])
    bars = [
        plots.Bar(
            variant=each.variant,
            style=looks[each.variant],
            parts=tuple((name, decision.weights[name] * each.normalized[name]) for name in METRICS),
            score=each.score,
            low=each.score if each.score_low is None else each.score_low,
            high=each.score if each.score_high is None else each.score_high,
            chosen=each.variant == decision.winner,
        )
        for each in able
        if each.score is not None
    ]
    name, width = ("score-narrow", plots.WIDTH) if narrow else ("score", 2 * plots.WIDTH)
    return plots.score_bars(name, "Score of each variant, by what each metric adds", bars, width) if bars else None


def trade_off(decision: Production, metric: str) -> Markup | None:
    """Quality over *metric*; None where fewer than two variants have both."""
    measured = [each for each in decision.candidates if {"quality", metric} <= each.raw.keys()]
    if len(measured) < 2:
        return None
    factor, unit = _unit(metric, max(each.raw[metric] for each in measured))
    looks = styles([each.variant for each in decision.candidates])
    whole = next((each.raw["quality"] for each in measured if each.variant == REFERENCE), None)
    points = [
        plots.Point(
            variant=each.variant,
            style=looks[each.variant],
            x=each.raw[metric] / factor,
            y=each.raw["quality"],
            x_interval=_own(each, metric, factor),
            y_interval=_of_the_difference(each, whole),
            chosen=each.variant == decision.winner,
            eligible=not each.excluded,
        )
        for each in measured
    ]
    title = f"Quality over {TITLES[metric].lower()}"
    return plots.scatter(f"quality-{metric}", title, f"{TITLES[metric]}, {unit}", "quality", points)


def _own(candidate: Candidate, metric: str, factor: float) -> tuple[float, float] | None:
    found = candidate.intervals.get(metric)
    return (found.low / factor, found.high / factor) if found else None


def _of_the_difference(candidate: Candidate, whole: float | None) -> tuple[float, float] | None:
    """Quality's interval beside fp16's, on the same items: a variant's own would hide what the items have in common.
    fp16 itself has none; without fp16 it is each one's own."""
    if whole is None:
        return _own(candidate, "quality", 1.0)
    change = candidate.change.get("quality")
    return (whole * (1 + change.low), whole * (1 + change.high)) if change else None


def _unit(metric: str, highest: float) -> tuple[float, str]:
    if metric != "memory":
        return SCALES[metric]
    prefix = si(highest).split()[-1] if " " in si(highest).strip() else ""
    return {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(prefix, 1.0), f"{prefix}B"


def over_concurrency(evaluations: Sequence[Evaluation], field: str, title: str) -> Markup | None:
    """p50 and p95 of a latency at every concurrency that was measured; None without a sweep."""
    if not any(each.sweep for each in evaluations):
        return None
    looks = styles([each.variant for each in evaluations])
    given = []
    for each in evaluations:
        points = sorted([*each.sweep, each.load], key=lambda load: load.concurrency)
        times: list[Percentiles] = [getattr(point, field) for point in points]
        given.append(
            plots.Line(
                variant=each.variant,
                style=looks[each.variant],
                at=tuple(float(point.concurrency) for point in points),
                p50=tuple(each.p50 for each in times),
                p95=tuple(each.p95 for each in times),
            )
        )
    return plots.lines(f"load-{field.replace('_', '-')}", title, f"{title}, ms", given)


def machines(evaluations: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Those of one hardware together."""
    names = by_machine({each.variant: each for each in evaluations})
    return [[each for each in evaluations if each.variant in same] for same in names.values()]


def protocol(evaluation: Evaluation) -> str:
    """How often what was measured, in a sentence."""
    workload = evaluation.workload
    restarts, rounds = int(workload.get("restarts", 1)), len(evaluation.rounds)
    said = f"{workload['protocol']}: " if workload.get("protocol") else ""
    said += _count(restarts, "start") + " of each server, "
    said += f"{_count(rounds, 'round')} of load{' in all' if restarts > 1 else ''}"
    turns = evaluation.interleaved_with
    return said + (", the variants' servers side by side in turns" if turns else ", one variant after another")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def settings_file(report: RunReport) -> str:
    """What the run was told, as ``slipway run --config`` reads it. A file that it names has its digest in a comment."""
    import yaml

    workload = report.decision.workload if report.decision else {}
    digests = {f"workload.{field}": workload.get(digest) for field, digest in DIGESTS.items()}
    calibrated = [each.calibration_digest for each in report.variants if each.calibration_digest]
    digests["optimize.calibration.text"] = calibrated[0] if calibrated else None
    comments = [f"# {field}: sha256 {digest}\n" for field, digest in digests.items() if digest]
    return "".join(comments) + yaml.safe_dump(report.settings, sort_keys=False, allow_unicode=True)


def command(decision: Production, source: str) -> str:
    """What repeats the run, with its settings in a file."""
    said = ["slipway", "run", source, "--config", SETTINGS_FILE]
    if not decision.model.startswith("local/"):
        said += ["--revision", decision.commit]
    if decision.price:
        price = decision.price
        said += ["--set", f"platform.price_per_hour={price.per_hour}", "--set", f"platform.currency={price.currency}"]
    return shlex.join(said)


def sha256_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def seeds(workload: Mapping[str, Any]) -> str:
    return str(workload.get("seed", Workload.model_fields["seed"].default))
