"""The candidates of a decision: every variant with its scores and measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import numpy as np

from scoring.anchored import SIGNS
from scoring.arrays import Floats
from scoring.choice import Verdict
from scoring.cost import per_million
from scoring.estimate import Estimate
from scoring.items import Items, common, flips, mean_difference
from scoring.lead import Lead
from scoring.metrics import METRICS
from scoring.results import Change
from scoring.sensitivity import shares_anywhere, shares_near
from stages.parts.base.files import digest_of
from stages.parts.records.evaluation import Evaluation, TaskScore, machine_of
from stages.parts.records.production import Candidate, Cost, Interval, Loss, Paired, Price
from stages.select.measurements import SPEED, Measurements

ANSWERS: Final = 1000
"""Answers whose cost is shown."""
THROUGHPUT: Final = list(METRICS).index("throughput")


def candidates_of(
    measurements: Measurements, estimate: Estimate, verdict: Verdict, excluded: Mapping[str, str], price: Price | None
) -> tuple[Candidate, ...]:
    """Describe the variants that can be chosen, best score first, then the excluded ones, with the reasons."""
    able = estimate.order([name for name in estimate.evidence.variants if name not in excluded])
    ranked = [*verdict.ranking, *(name for name in able if name not in verdict.ranking)]
    normalized: dict[str, Floats] = {name: np.clip(estimate.at[estimate.place(name)], 0.0, 1.0) for name in ranked}
    front = measurements.pareto_front(ranked)
    near, anywhere = shares_near(normalized, estimate.criteria.weights.shares()), shares_anywhere(normalized)
    scored: dict[str, dict[str, Any]] = {}
    for name in ranked:
        score = estimate.score(estimate.place(name))
        low, high = score.interval() or (None, None)
        scored[name] = {
            "normalized": dict(zip(METRICS, map(float, normalized[name]), strict=True)),
            "score": score.value,
            "score_low": None if low is None else max(0.0, low),
            "score_high": None if high is None else min(1.0, high),
            "chance": verdict.chances.get(name),
            "weights_share": near[name],
            "any_weights_share": anywhere[name],
            "pareto": front[name],
        }
    unscored: dict[str, Any] = {"normalized": {}, "score": None, "score_low": None, "score_high": None, "pareto": None}
    return tuple(
        Candidate(
            **_measured(measurements, estimate, name, price), **scored.get(name, unscored), excluded=excluded.get(name)
        )
        for name in (*ranked, *excluded)
    )


def _measured(measurements: Measurements, estimate: Estimate, name: str, price: Price | None) -> dict[str, Any]:
    """Return the fields of a variant's ``Candidate`` that follow from what was measured of it."""
    evaluation, losses = measurements.evaluations.get(name), measurements.losses.get(name, {})
    reference, questions = measurements.reference, measurements.questions
    compared = name in estimate.evidence.variants
    rate = estimate.figure(estimate.place(name), THROUGHPUT) if compared else None
    raw, intervals = figures(measurements, estimate, name)
    return {
        "variant": name,
        "digest": evaluation.variant_digest if evaluation else None,
        "evaluation_key": evaluation.key if evaluation else None,
        "evaluation_digest": digest_of(evaluation) if evaluation else None,
        "raw": raw,
        "intervals": intervals,
        "answer_tokens": (tokens := measurements.answer_tokens(name)),
        "answer_growth": measurements.growths.get(name),
        "change": changes(measurements, estimate, name),
        "losses": tuple(Loss(task=task, **vars(loss), verdict=loss.verdict) for task, loss in losses.items()),
        "against_fp16": paired(questions.get(reference, {}), questions.get(name, {})) if name != reference else (),
        "recovery": recovery(evaluation, measurements.reference_quality),
        "divergence": measurements.divergences.get(name),
        "cost": cost_of(evaluation, price, rate, tokens) if evaluation else None,
    }


def changes(measurements: Measurements, estimate: Estimate, name: str) -> dict[str, Change]:
    """Compare each metric with the reference's; latency and throughput only on the same hardware."""
    if name == measurements.reference or name not in estimate.evidence.variants:
        return {}
    reference = measurements.evaluations.get(measurements.reference)
    same_hardware = reference is None or machine_of(measurements.evaluations[name]) == machine_of(reference)
    return {
        metric: change_of(metric, estimate.ratio(estimate.place(name), number))
        for number, metric in enumerate(METRICS)
        if same_hardware or metric not in SPEED
    }


def change_of(metric: str, better: Lead) -> Change:
    """Compute by what share a metric changes that is that much *better*, ln of a factor."""
    sign = float(SIGNS[list(METRICS).index(metric)])
    low, high = sorted(math.expm1(sign * end) for end in better.interval() or ()) or (None, None)
    return Change(value=math.expm1(sign * better.value), low=low, high=high)


def paired(reference: Mapping[str, Items], variant: Mapping[str, Items]) -> tuple[Paired, ...]:
    """Compare the variant with the reference on the items that both were asked, task by task, where there are any."""
    pairs = []
    for task in [task for task in reference if task in variant]:
        ours, theirs = common(reference[task], variant[task])
        if not ours.values.size:
            continue
        if ours.sizes is None:
            difference = mean_difference(ours.values, theirs.values, ours.weights, ours.clusters)
            flipped = flips(ours.values > 0.5, theirs.values > 0.5)
        else:
            bits = [-items.values / ours.sizes / np.log(2) for items in (ours, theirs)]
            difference, flipped = mean_difference(bits[0], bits[1], ours.sizes, ours.clusters), None
        pairs.append(
            Paired(
                task=task,
                kind="accuracy" if flipped else "perplexity",
                difference=difference.mean,
                low=difference.low,
                high=difference.high,
                lost=flipped.lost if flipped else None,
                gained=flipped.gained if flipped else None,
                p_value=flipped.p_value if flipped else None,
            )
        )
    return tuple(pairs)


def figures(measurements: Measurements, estimate: Estimate, name: str) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return the metrics that are scored, and the 95 % intervals of those that have noise; what was measured of a
    variant that can't be compared."""
    evaluation = measurements.evaluations.get(name)
    if name not in estimate.evidence.variants:
        measured = evaluation.metrics() if evaluation else {}
        return {metric: value for metric, value in measured.items() if math.isfinite(value)}, {}
    raw, intervals = {}, {}
    for number, metric in enumerate(METRICS):
        figure = estimate.figure(estimate.place(name), number)
        raw[metric], interval = math.exp(figure.value), figure.interval()
        if figure.deviation and interval:
            intervals[metric] = Interval(low=math.exp(interval[0]), high=math.exp(interval[1]))
    return raw, intervals


def cost_of(
    evaluation: Evaluation, price: Price | None, throughput: Lead | None, answer_tokens: float | None
) -> Cost | None:
    """Compute the cost of a million output tokens: at the capacity if the workload has targets, otherwise at the
    measured throughput, on all GPUs that the price is for. There is none without a price, or if the rate is 0 because
    no request met the targets. The interval shows the noise of *throughput*, ln of the rate, which is None if it can't
    be compared. *answer_tokens* are those of an answer."""
    if price is None:
        return None
    basis: Literal["goodput", "throughput"] = "goodput" if evaluation.goodput else "throughput"
    rate = (evaluation.capacity or evaluation.goodput or evaluation.load).output_tokens_per_s / evaluation.gpu_share
    value = per_million(price.per_hour, rate)
    if value is None:
        return None
    reach = throughput.reach() if throughput else math.inf
    factor = math.exp(reach) if math.isfinite(reach) else 1.0
    low, high = value / factor, value * factor
    answers = value * answer_tokens * ANSWERS / 1e6 if answer_tokens else None
    return Cost(
        value=value, low=low, high=high, currency=price.currency, tokens_per_s=rate, basis=basis, answers=answers
    )


def recovery(evaluation: Evaluation | None, reference: Iterable[TaskScore]) -> dict[str, float]:
    """Divide the variant's score by the reference's, by task: accuracies as they are, perplexities as the probability
    per byte (2^(−bits per byte)), so that 0.99 means a loss of one percent for both."""
    base = {score.task: score.score for score in reference}
    if evaluation is None:
        return {}
    return {score.task: score.score / base[score.task] for score in evaluation.quality if base.get(score.task, 0.0) > 0}
