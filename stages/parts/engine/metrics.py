"""A release's totals from vLLM's own ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Histogram:
    """A Prometheus histogram: cumulative counts by upper bound in seconds, the last one infinite.

    The last count is the number of observations. Empty where the server has told nothing yet.
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()


@dataclass(frozen=True)
class Counters:
    """Running totals of one release, over all of its replicas, from vLLM's own metrics.

    Requests to ``url()`` are counted as those of clients are.
    """

    answered: float
    """Requests that were answered with 2xx."""
    failed: float
    """Requests that ended in 5xx. On one machine also those that never reached a living server; on a cluster not, since
    Kubernetes tells nothing of what a gateway refuses itself, and each gateway counts it in its own way."""
    refused: float
    """Requests that ended in 4xx: the client's mistake, or a release that refuses what another one takes."""
    output_tokens: float
    """Of requests that have ended (``vllm:request_generation_tokens_sum``): their time is below."""
    in_flight_s: float
    """Seconds from arrival to end, summed over requests that have ended (``vllm:e2e_request_latency_seconds_sum``).
    By Little's law the integral of the requests in flight: tokens per second of it is the speed that each one sees."""
    ttft_s: Histogram
    """``vllm:time_to_first_token_seconds``: how many there are is the number of requests that can be compared."""
    tpot_s: Histogram
    """``vllm:request_time_per_output_token_seconds``."""
    instance: str
    """Changes when a server was started anew, and its totals with it from zero."""


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
