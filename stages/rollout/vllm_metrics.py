"""A release's totals from vLLM's own ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from stages.rollout.target import Counters, Histogram

REQUESTS: Final = "http_requests_total"
"""By prometheus-fastapi-instrumentator, with labels ``handler`` and ``status`` (2xx, 4xx, 5xx)."""
API: Final = "/v1/"
"""Handlers below it answer clients; /health and /metrics do not count."""
READING: Final = "GET"
"""/v1/models is no completion."""


OUTPUT_TOKENS: Final = "vllm:request_generation_tokens_sum"
IN_FLIGHT: Final = "vllm:e2e_request_latency_seconds_sum"
TTFT: Final = "vllm:time_to_first_token_seconds"
TPOT: Final = "vllm:request_time_per_output_token_seconds"
METRICS: Final = (REQUESTS, OUTPUT_TOKENS, IN_FLIGHT, f"{TTFT}_bucket", f"{TPOT}_bucket")
"""All that is read."""


def counters(text: str, instance: str) -> Counters:
    """The totals in one server's answer to ``GET /metrics``."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return counters_of(samples, instance)


def counters_of(samples: Sequence[Sample], instance: str) -> Counters:
    """The totals in samples of any number of servers."""
    return Counters(
        answered=_requests(samples, "2xx"),
        failed=_requests(samples, "5xx"),
        refused=_requests(samples, "4xx"),
        output_tokens=_sum(samples, OUTPUT_TOKENS),
        in_flight_s=_sum(samples, IN_FLIGHT),
        ttft_s=_histogram(samples, TTFT),
        tpot_s=_histogram(samples, TPOT),
        instance=instance,
    )


def _requests(samples: Iterable[Sample], status: str) -> float:
    return sum(
        each.value
        for each in samples
        if each.name == REQUESTS
        and each.labels.get("status") == status
        and each.labels.get("handler", "").startswith(API)
        and each.labels.get("method") != READING
    )


def _sum(samples: Iterable[Sample], name: str) -> float:
    return sum(each.value for each in samples if each.name == name)


def _histogram(samples: Iterable[Sample], name: str) -> Histogram:
    """Over all engines of the server: cumulative counts add up bound by bound."""
    counts: dict[float, float] = {}
    for each in samples:
        if each.name == f"{name}_bucket":
            bound = float(each.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + each.value
    bounds = tuple(sorted(counts))
    return Histogram(bounds, tuple(counts[bound] for bound in bounds))
