"""A release's counters from vLLM's own ``/metrics``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import ValidationError

from stages.parts.base.errors import TransientError
from stages.parts.records.rollout import Counters

REQUESTS: Final = "http_requests_total"
"""Counted by prometheus-fastapi-instrumentator, with labels ``handler`` and ``status`` (2xx, 4xx, 5xx)."""
API: Final = "/v1/"
"""Only handlers below it answer clients; /health and /metrics are not counted."""
TTFT: Final = "vllm:time_to_first_token_seconds"
TPOT: Final = "vllm:request_time_per_output_token_seconds"
CACHE: Final = "vllm:kv_cache_usage_perc"
SUMMED: Final = {
    "output_tokens": "vllm:request_generation_tokens_sum",
    "prompt_tokens": "vllm:request_prompt_tokens_sum",
    "prompts": "vllm:request_prompt_tokens_count",
    "ttft_s": f"{TTFT}_sum",
    "tpot_s": f"{TPOT}_sum",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preempted": "vllm:num_preemptions_total",
}
"""Fields of ``Counters``, each with the series that it is the sum of."""
METRICS: Final = (REQUESTS, *SUMMED.values(), f"{TTFT}_bucket", f"{TPOT}_bucket", CACHE)
"""All series that are read."""
PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
GENERATED_TOKENS: Final = "vllm:generation_tokens_total"
STARTED: Final = "process_start_time_seconds"


def samples_in(text: str, *names: str) -> list[Sample]:
    """Read the samples in a server's answer to ``GET /metrics``, or only those whose names begin with *names*."""
    lines = "\n".join(line for line in text.splitlines() if not names or line.startswith(names))
    return [sample for family in text_string_to_metric_families(lines) for sample in family.samples]


def read_counters(text: str, instance: str) -> Counters:
    """Read the counters in one server's answer to ``GET /metrics``."""
    return sum_counters(samples_in(text), instance)


def read_start(text: str) -> tuple[str, float]:
    """Read the model that the server has, and when it started, in seconds since 1970; ValueError if it is no vLLM."""
    samples = samples_in(text, PROMPT_TOKENS, STARTED)
    models = [sample.labels.get("model_name", "") for sample in samples if sample.name == PROMPT_TOKENS]
    if not models:
        raise ValueError(f"no {PROMPT_TOKENS}")
    return models[0], _sum(samples, STARTED)


def read_tokens(text: str) -> tuple[int, int]:
    """Read the tokens of prompts and of answers that the server has computed since its start; ValueError if one of
    these numbers is not finite."""
    samples = samples_in(text, PROMPT_TOKENS, GENERATED_TOKENS)
    try:
        return int(_sum(samples, PROMPT_TOKENS)), int(_sum(samples, GENERATED_TOKENS))
    except OverflowError as error:
        raise ValueError("vLLM's metrics hold a value that is not a number") from error


def sum_counters(samples: Sequence[Sample], instance: str) -> Counters:
    """Sum the counters over the samples of any number of servers; TransientError if one is not a finite number."""
    (ttft_bounds, ttft), (tpot_bounds, tpot) = _histogram(samples, TTFT), _histogram(samples, TPOT)
    sums: dict[str, Any] = {field: _sum(samples, series) for field, series in SUMMED.items()}
    try:
        return Counters(
            answered=_requests(samples, "2xx"),
            failed=_requests(samples, "5xx"),
            refused=_requests(samples, "4xx"),
            ttft_bounds=ttft_bounds,
            ttft=ttft,
            tpot_bounds=tpot_bounds,
            tpot=tpot,
            cache_used=max((sample.value for sample in samples if sample.name == CACHE), default=0.0),
            instance=instance,
            **sums,
        )
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise TransientError(f"vLLM's metrics hold a value that is not a number: {field}") from error


def _requests(samples: Iterable[Sample], status: str) -> float:
    return sum(
        sample.value
        for sample in samples
        if sample.name == REQUESTS
        and sample.labels.get("status") == status
        and sample.labels.get("handler", "").startswith(API)
        and sample.labels.get("method") != "GET"  # /v1/models is not a completion
    )


def _sum(samples: Iterable[Sample], name: str) -> float:
    return sum(sample.value for sample in samples if sample.name == name)


def _histogram(samples: Sequence[Sample], name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Sum over all engines of the server: cumulative counts add up bound by bound. Returns the finite bounds, and the
    counts."""
    counts: dict[float, float] = {}
    for sample in samples:
        if sample.name == f"{name}_bucket":
            bound = float(sample.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sample.value
    bounds = sorted(counts)
    return tuple(filter(math.isfinite, bounds)), tuple(counts[bound] for bound in bounds)
