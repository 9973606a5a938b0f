"""Bootstrap draws of the metrics, computed from the raw samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from stages.parts.records.evaluation import Evaluation
from stages.parts.samples.capacity import throughput_of, within
from stages.parts.samples.lines import Samples
from stages.parts.samples.questions import Questions

if TYPE_CHECKING:
    from scoring.arrays import Floats
    from scoring.draws import Draws, Round

LIMITED: Final = {"ttft_p95_ms": "ttft_ms", "tpot_p95_ms": "tpot_ms"}
"""Constraints on the 95th percentile of a request's time, with the name of that time in the samples."""


def metric_draws(
    evaluations: Mapping[str, Evaluation],
    samples: Mapping[str, Samples],
    questions: Questions,
    limits: Collection[str] = (),
) -> Draws:
    """Draws of latency, throughput, goodput and quality by variant; without quality if the variants have different
    tasks. They give each figure its own interval; variants are compared by ``scoring.estimate``.

    Args:
        limits: the constrained measures; those that the load gives are drawn too.
    """
    from scoring.draws import allowing_for_few, load_draws, quality_draws

    measured = {name: rounds(each, evaluations[name], limits) for name, each in samples.items() if each.rounds}
    found: dict[str, dict[str, Floats]] = {name: {} for name in samples}
    found |= allowing_for_few(load_draws(measured), measured)
    try:
        quality = quality_draws(questions)
    except ValueError:
        return found
    return {name: {**each, **quality[name]} for name, each in found.items()}


def rounds(samples: Samples, evaluation: Evaluation, limits: Collection[str] = ()) -> list[Round]:
    """The measurements of each round, with the times of requests that the *limits* apply to."""
    import numpy as np

    from scoring.draws import Round

    slo = evaluation.goodput
    starts = {each.run.restart for each in samples.rounds}
    throughput = (
        {
            start: throughput_of(
                *([run for run in runs if run.run.restart == start] for runs in (samples.rounds, samples.trials))
            )
            for start in starts
        }
        if samples.trials
        else {}
    )
    found = []
    for each in samples.rounds:
        others = {
            name: [getattr(one, time) for one in each.requests] for name, time in LIMITED.items() if name in limits
        }
        good = [within(one, slo.ttft_ms, slo.tpot_ms) for one in each.requests] if slo else []
        if slo and "goodput_share" in limits:
            others["goodput_share"] = good
        good_tokens = sum(one.output_tokens for one, met in zip(each.requests, good, strict=False) if met)
        found.append(
            Round(
                latencies_ms=np.array([one.e2el_ms for one in each.requests]),
                output_tokens_per_s=throughput.get(each.run.restart, each.output_tokens_per_s),
                start=each.run.restart,
                good_tokens_per_s=good_tokens / each.run.duration_s if slo else None,
                others={name: np.array(values, dtype=float) for name, values in others.items()},
            )
        )
    return found


def took_turns(evaluations: Mapping[str, Evaluation]) -> bool:
    """Whether all variants were measured side by side, round by round, so that the machine affected all equally."""
    names = set(evaluations)
    return len(names) > 1 and all({name, *each.interleaved_with} >= names for name, each in evaluations.items())


def machine_speeds(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """The speed of the machine when each variant was measured: the geometric mean of its probes. Variants measured on
    GPUs are missing, because GPUs are not probed."""
    found = {}
    for name, each in evaluations.items():
        if each.drift and not each.hardware.gpus:
            speeds = [speed for probe in each.drift.probes() for speed in probe.model_dump().values()]
            found[name] = math.exp(sum(map(math.log, speeds)) / len(speeds))
    return found
