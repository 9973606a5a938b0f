"""What one replica should have of the metric that replicas follow: by default what its release was measured to serve
within the workload's targets."""

from __future__ import annotations

import math
from typing import Final

from stages.parts.records.production import Production
from stages.parts.releases.pinned import MeasuredWith
from stages.parts.releases.release import METRICS
from stages.rollout.kserve.objects import KServeEndpoint

UNMEASURED: Final = 10
"""Requests in flight, where nothing is known."""
FILLED: Final = 0.8
"""How far a replica is filled: a HorizontalPodAutoscaler tolerates a tenth more, and another replica takes minutes."""
LATE_MS: Final = 2000.0
"""The time of the first token, where the workload has no target."""


def target_of(endpoint: KServeEndpoint, release: str) -> float:
    """Return ``scaling.target`` or, for *auto*, what the release was measured to do."""
    scaling = endpoint.settings.scaling
    if scaling.target != "auto":
        return scaling.target
    if scaling.metric == "kv_cache":
        return FILLED  # beyond which vLLM soon takes requests out of it
    measured = MeasuredWith.of(endpoint.store.releases / release)
    if scaling.metric == "ttft":
        return measured.slo.ttft_ms if measured.slo else LATE_MS
    if scaling.metric == "queue":  # as many prompts as are read in time
        prompt = measured.workload.get("prompt_tokens")
        return max(1, math.floor(FILLED * measured.read_in_time / prompt)) if measured.read_in_time and prompt else 1
    return concurrency_of(endpoint, release)


def concurrency_of(endpoint: KServeEndpoint, release: str) -> int:
    """Compute the requests that one replica should have, running and waiting.

    At the highest rate that meets the targets there are as many as come in the time that one takes (Little 1961,
    Operations Research 9, 383–387). That time was measured at a lower rate, so that it is rather too short and the
    number too low. Where the length of answers is not known, as with a trace, or the throughput is that of several
    servers, the workload's own number counts.
    """
    scaling = endpoint.settings.scaling
    decision = Production.read_if_intact(endpoint.store.releases / release / METRICS)
    if scaling.metric == "concurrency" and scaling.target != "auto":
        return max(1, math.floor(scaling.target))
    if decision is None:
        return UNMEASURED
    tokens, figures = decision.workload.get("output_tokens"), decision.chosen.raw
    one_server = decision.recipe is None or decision.recipe.tensor_parallel_size is None
    if tokens and one_server and decision.workload.get("slo") and {"throughput", "latency"} <= figures.keys():
        in_flight: float = figures["throughput"] / tokens * figures["latency"] / 1000
    else:
        in_flight = float(decision.workload.get("concurrency", UNMEASURED))
    return max(1, math.floor(FILLED * in_flight))


def cold_start_of(endpoint: KServeEndpoint, release: str) -> str:
    """Say what a request waits for that finds no replica, as the start was measured."""
    if (engine := MeasuredWith.of(endpoint.store.releases / release).engine) is None:
        return "until its model has loaded"
    return f"about {engine.ready_s:.0f} s" + (f" ({engine.start.text})" if engine.start else "")
