"""The candidates of a decision: every variant with its scores and measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from scoring.metrics import METRICS
from stages.parts.base.settings import REFERENCE
from stages.parts.base.store import digest_of
from stages.parts.records.evaluation import Evaluation, machine_of
from stages.parts.records.production import Candidate, Change, Cost, Interval, Paired, Price
from stages.select.evidence import SPEED, Evidence

if TYPE_CHECKING:
    from scoring.decide import Decision
    from scoring.draws import Items
    from scoring.normalize import Floats


def candidates_of(
    evidence: Evidence, decision: Decision, excluded: Mapping[str, str], price: Price | None
) -> tuple[Candidate, ...]:
    """The eligible variants, best score first, then the excluded ones.

    Args:
        excluded: why, by variant.
    """
    front = evidence.pareto_front(decision.eligible)
    return tuple(
        candidate(evidence, decision, name, pareto=front.get(name), excluded=excluded.get(name), price=price)
        for name in (*decision.eligible, *excluded)
    )


def candidate(
    evidence: Evidence, decision: Decision, name: str, *, pareto: bool | None, excluded: str | None, price: Price | None
) -> Candidate:
    evaluation, drawn = evidence.evaluations.get(name), evidence.draws.get(name, {})
    metrics = evaluation.metrics() if evaluation else {}
    eligible = name in decision.eligible
    scores = decision.ranking.loc[name].astype(float).to_dict() if eligible else {}
    low, high = decision.score_interval.get(name, (None, None))
    return Candidate(
        variant=name,
        digest=evaluation.variant_digest if evaluation else None,
        evaluation_key=evaluation.key if evaluation else None,
        evaluation_digest=digest_of(evaluation) if evaluation else None,
        excluded=excluded,
        raw={metric: value for metric, value in metrics.items() if math.isfinite(value)},
        intervals=intervals(metrics, drawn),
        change=changes_from_reference(evidence, name),
        normalized={metric: scores[metric] for metric in METRICS if eligible},
        score=scores.get("score"),
        score_low=low,
        score_high=high,
        win_probability=decision.win_probability.get(name),
        weights_share=decision.near_weights.get(name),
        any_weights_share=decision.any_weights.get(name),
        pareto=pareto,
        against_fp16=paired_with_reference(evidence, name) if eligible else (),
        recovery=recovery(evaluation, evidence.evaluations.get(REFERENCE)),
        divergence=evidence.divergences.get(name),
        cost=cost_of(evaluation, price, drawn) if evaluation else None,
    )


def changes_from_reference(evidence: Evidence, name: str) -> dict[str, Change]:
    """Each metric compared with fp16's; latency and throughput only if both were measured on the same hardware."""
    measured, reference = evidence.evaluations.get(name), evidence.evaluations.get(REFERENCE)
    if measured is None or reference is None or name == REFERENCE:
        return {}
    found = changes(measured.metrics(), reference.metrics(), evidence.draws[name], evidence.draws[REFERENCE])
    same = machine_of(measured) == machine_of(reference)
    return {metric: change for metric, change in found.items() if same or metric not in SPEED}


def paired_with_reference(evidence: Evidence, name: str) -> tuple[Paired, ...]:
    if REFERENCE not in evidence.questions or name == REFERENCE:
        return ()
    return paired(evidence.questions[REFERENCE], evidence.questions[name])


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


def intervals(values: Mapping[str, float], drawn: Mapping[str, Floats]) -> dict[str, Interval]:
    """The 95 % interval of each metric that has draws: their percentiles 2.5 and 97.5."""
    import numpy as np

    found = {}
    for metric, draws in drawn.items():
        if metric in values and math.isfinite(values[metric]):
            low, high = (float(each) for each in np.percentile(draws, [2.5, 97.5]))
            found[metric] = Interval(low=min(low, values[metric]), high=max(high, values[metric]))
    return found


def changes(
    values: Mapping[str, float],
    reference: Mapping[str, float],
    drawn: Mapping[str, Floats],
    drawn_reference: Mapping[str, Floats],
) -> dict[str, Change]:
    """The change of each metric from the reference's, as a share of it; exact if neither has draws."""
    import numpy as np

    found = {}
    for metric, whole in reference.items():
        if not (whole > 0 and math.isfinite(values.get(metric, math.nan))):
            continue
        value = values[metric] / whole - 1
        ours, theirs = drawn.get(metric, values[metric]), drawn_reference.get(metric, whole)
        if np.all(np.asarray(theirs) > 0):
            low, high = (float(each) for each in np.percentile(ours / theirs - 1, [2.5, 97.5]))
            found[metric] = Change(value=value, low=min(low, value), high=max(high, value))
    return found


def cost_of(evaluation: Evaluation, price: Price | None, drawn: Mapping[str, Floats]) -> Cost | None:
    """The cost of a million output tokens: at the goodput if the workload has targets, otherwise at the measured
    throughput. None without a price, or if the rate is 0 because no request met the targets."""
    from scoring.cost import per_million

    if price is None:
        return None
    basis: Literal["goodput", "throughput"] = "goodput" if evaluation.goodput else "throughput"
    rate = (evaluation.goodput or evaluation.load).output_tokens_per_s
    found = per_million(price.per_hour, rate, drawn.get(basis))
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
