"""The candidates of a decision: every variant with its scores and measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from scoring.metrics import METRICS
from stages.parts.base.store import digest_of
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Candidate, Change, Cost, Interval, Loss, Paired, Price
from stages.select.measurements import SPEED, Measurements

if TYPE_CHECKING:
    from scoring.arrays import Floats
    from scoring.choice import Verdict
    from scoring.draws import Items
    from scoring.estimate import Estimate, Lead


def candidates_of(
    found: Measurements, estimate: Estimate, verdict: Verdict, excluded: Mapping[str, str], price: Price | None
) -> tuple[Candidate, ...]:
    """The variants that can be chosen, best score first, then the excluded ones.

    Args:
        excluded: why, by variant.
    """
    from scoring.sensitivity import shares_anywhere, shares_near

    able = estimate.order([name for name in estimate.evidence.variants if name not in excluded])
    beaten = [name for name in able if name not in verdict.ranking]
    ranked = [*verdict.ranking, *beaten]
    between = {name: _normalized(estimate, name) for name in ranked}
    front, shares = found.pareto_front(ranked), estimate.criteria.shares()
    near, anywhere = shares_near(between, shares), shares_anywhere(between)
    scored = {
        name: _scored(estimate, verdict, name, normalized=each)
        | {"weights_share": near[name], "any_weights_share": anywhere[name], "pareto": front[name]}
        for name, each in between.items()
    }
    return tuple(
        candidate(found, estimate, name, price=price).model_copy(
            update={"excluded": excluded.get(name), **scored.get(name, {})}
        )
        for name in (*ranked, *excluded)
    )


def candidate(found: Measurements, estimate: Estimate, name: str, *, price: Price | None) -> Candidate:
    """A variant without what only those that can be chosen have."""
    evaluation, drawn = found.evaluations.get(name), found.draws.get(name, {})
    raw, intervals = figures(found, estimate, name)
    return Candidate(
        variant=name,
        digest=evaluation.variant_digest if evaluation else None,
        evaluation_key=evaluation.key if evaluation else None,
        evaluation_digest=digest_of(evaluation) if evaluation else None,
        excluded=None,
        raw=raw,
        intervals=intervals,
        change=changes(found, estimate, name),
        losses=tuple(
            Loss(task=task, **vars(each), verdict=each.verdict) for task, each in found.losses.get(name, {}).items()
        ),
        normalized={},
        score=None,
        score_low=None,
        score_high=None,
        pareto=None,
        against_fp16=paired_with_reference(found, name),
        recovery=recovery(evaluation, found.evaluations.get(found.reference)),
        divergence=found.divergences.get(name),
        cost=cost_of(evaluation, price, drawn) if evaluation else None,
    )


def _normalized(estimate: Estimate, name: str) -> Floats:
    """The metrics between their anchors, in the order of ``METRICS``."""
    import numpy as np

    from scoring.anchored import scaled

    found: Floats = np.clip(scaled(estimate.ratios[estimate.place(name)], estimate.criteria.anchors), 0.0, 1.0)
    return found


def _scored(estimate: Estimate, verdict: Verdict, name: str, *, normalized: Floats) -> dict[str, object]:
    score = estimate.score(estimate.place(name))
    low, high = _interval(score)
    return {
        "normalized": dict(zip(METRICS, map(float, normalized), strict=True)),
        "score": score.value,
        "score_low": None if low is None else max(0.0, low),
        "score_high": None if high is None else min(1.0, high),
        "chance": verdict.chances.get(name),
    }


def _interval(lead: Lead) -> tuple[float | None, float | None]:
    """The 95 % interval; None without the noise of starts."""
    reach = lead.reach(0.025)
    return (lead.value - reach, lead.value + reach) if math.isfinite(reach) else (None, None)


def changes(found: Measurements, estimate: Estimate, name: str) -> dict[str, Change]:
    """Each metric compared with the reference's; latency and throughput only on the same hardware."""
    from scoring.anchored import SIGNS

    if name == found.reference or name not in estimate.evidence.variants:
        return {}
    told, same = {}, found.on_the_same_hardware(name)
    for number, metric in enumerate(METRICS):
        if metric in SPEED and not same:
            continue
        ratio, sign = estimate.ratio(estimate.place(name), number), float(SIGNS[number])
        ends = [None if each is None else math.expm1(sign * each) for each in _interval(ratio)]
        low, high = ends if sign > 0 else ends[::-1]
        told[metric] = Change(value=math.expm1(sign * ratio.value), low=low, high=high)
    return told


def paired_with_reference(found: Measurements, name: str) -> tuple[Paired, ...]:
    reference = found.reference
    if reference not in found.questions or name == reference or name not in found.questions:
        return ()
    return paired(found.questions[reference], found.questions[name])


def paired(reference: Mapping[str, Items], variant: Mapping[str, Items]) -> tuple[Paired, ...]:
    """The variant compared with the reference on the items that both were asked, task by task; without tasks that have
    no such items."""
    import numpy as np

    from scoring.draws import common
    from scoring.paired import flips, mean_difference

    found = []
    for task in reference:
        if task not in variant:
            continue
        ours, theirs = common(reference[task], variant[task])
        if not ours.values.size:
            continue
        # With several starts, an item counts with its mean, and is correct if it was correct in most starts.
        mine, other = (np.atleast_2d(each.values).mean(axis=0) for each in (ours, theirs))
        if ours.sizes is None:
            moved, flipped = mean_difference(mine, other, ours.weights), flips(mine > 0.5, other > 0.5)
        else:
            bits = [-each / ours.sizes / np.log(2) for each in (mine, other)]
            moved, flipped = mean_difference(bits[0], bits[1], ours.sizes), None
        found.append(
            Paired(
                task=task,
                kind="accuracy" if flipped else "perplexity",
                difference=moved.mean,
                low=moved.low,
                high=moved.high,
                lost=flipped.lost if flipped else None,
                gained=flipped.gained if flipped else None,
                p_value=flipped.p_value if flipped else None,
            )
        )
    return tuple(found)


def figures(found: Measurements, estimate: Estimate, name: str) -> tuple[dict[str, float], dict[str, Interval]]:
    """The metrics that are scored, and the 95 % intervals of those that have noise; what was measured of a variant that
    can't be compared."""
    if name not in estimate.evidence.variants:
        measured = found.evaluations[name].metrics() if name in found.evaluations else {}
        return {metric: value for metric, value in measured.items() if math.isfinite(value)}, {}
    raw, intervals = {}, {}
    for number, metric in enumerate(METRICS):
        figure = estimate.figure(estimate.place(name), number)
        raw[metric], (low, high) = math.exp(figure.value), _interval(figure)
        if figure.deviation and low is not None and high is not None:
            intervals[metric] = Interval(low=math.exp(low), high=math.exp(high))
    return raw, intervals


def cost_of(evaluation: Evaluation, price: Price | None, drawn: Mapping[str, Floats]) -> Cost | None:
    """The cost of a million output tokens: at the capacity, or the goodput of older measurements, if the workload has
    targets; otherwise at the measured throughput. None without a price, or if the rate is 0 because no request met
    the targets."""
    from scoring.cost import per_million

    if price is None:
        return None
    basis: Literal["goodput", "throughput"] = "goodput" if evaluation.goodput else "throughput"
    rate = (evaluation.capacity or evaluation.goodput or evaluation.load).output_tokens_per_s
    found = per_million(price.per_hour, rate, drawn.get("throughput" if evaluation.capacity else basis))
    if found is None:
        return None
    high = found.high if math.isfinite(found.high) else None
    return Cost(value=found.value, low=found.low, high=high, currency=price.currency, tokens_per_s=rate, basis=basis)


def recovery(evaluation: Evaluation | None, reference: Evaluation | None) -> dict[str, float]:
    """The variant's score divided by the reference's, by task: accuracies as they are, perplexities as the probability
    per byte (2^(−bits per byte)), so that 0.99 means a loss of one percent for both."""
    if evaluation is None or reference is None:
        return {}
    whole = {each.task: each.score for each in reference.quality}
    return {each.task: each.score / whole[each.task] for each in evaluation.quality if whole.get(each.task, 0.0) > 0}
