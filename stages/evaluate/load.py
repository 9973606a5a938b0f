"""Latency and throughput under the workload's concurrency, by ``vllm bench serve``.

Chosen over a load generator of its own kind (guidellm, genai-perf): it comes with vLLM, so nothing more is
installed and its figures are those that vLLM's users quote; its result is one small JSON; and it takes the least
from a server with which it shares the processor.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from stages.errors import ConfigError, MeasurementFailed
from stages.records import Load, Percentiles
from stages.server import VLLM, Server, run_against
from stages.server_log import ServerLog
from stages.settings import Serving, Workload

RESULT: Final = "load.json"


def check_lengths(directory: Path, workload: Workload, serving: Serving) -> None:
    """Refuse a workload that the model can't hold, before anything is started.

    Raises:
        ConfigError: prompt and answer together are longer than the model, or the server, allows.
    """
    config = json.loads((directory / "config.json").read_text())
    known = config.get("text_config", config).get("max_position_embeddings")
    limits = [each for each in (serving.max_model_len, known) if isinstance(each, int)]
    check_fits(workload, min(limits, default=sys.maxsize))


def check_fits(workload: Workload, max_model_len: int) -> None:
    """Raises: ConfigError."""
    wanted = workload.prompt_tokens + workload.output_tokens
    if wanted > max_model_len:
        raise ConfigError(
            f"workload {workload.name!r} needs {workload.prompt_tokens} + {workload.output_tokens} = {wanted} tokens, "
            f"but the model is served with {max_model_len}",
            hint="lower prompt_tokens or output_tokens, or raise serving.max_model_len if the model allows it",
        )


@dataclass(frozen=True)
class Measured:
    """Everything that the load generator told."""

    load: Load
    """All rounds together."""
    rounds: tuple[Load, ...]
    requests: list[dict[str, float]]
    """One per request: ``round`` (from 0), ``ttft_ms``, ``tpot_ms``, ``e2el_ms``, ``output_tokens``."""


def measure_load(server: Server, directory: Path, workload: Workload, work: Path, logs_prefix: str) -> Measured:
    """Send the workload's requests, after a warm-up, round by round, and time every token.

    Prompts are random tokens of the workload's length, a different one for each request, so that no prefix is
    cached; every answer has exactly the workload's length. Seeded: every variant gets the same prompts.

    Args:
        work: where the generator's results are left.

    Raises:
        MeasurementFailed: a request failed, or a figure is missing or not finite.
        ServerFailed: the server ended.
    """
    results = []
    for number in range(workload.rounds):
        log = Path(f"{logs_prefix}.load-{number + 1}.log")
        status = run_against(server, command(server, directory, workload, work, number), log, {"HF_HUB_OFFLINE": "1"})
        try:
            results.append(json.loads((work / RESULT).read_text()))
        except (OSError, ValueError) as error:
            why = ServerLog(log).cause()
            raise MeasurementFailed(f"the load generator failed ({status}): {why}", hint=f"see {log}") from error
        (work / RESULT).unlink()
    return measured_of(results, workload)


def command(server: Server, directory: Path, workload: Workload, work: Path, number: int) -> list[str]:
    options = {
        "backend": "openai",
        "base-url": server.url,
        "endpoint": "/v1/completions",
        "model": server.name,
        "tokenizer": directory,
        "dataset-name": "random",
        "random-input-len": workload.prompt_tokens,
        "random-output-len": workload.output_tokens,
        "num-prompts": workload.requests,
        "num-warmups": workload.warmup_requests,
        "max-concurrency": workload.concurrency,
        "temperature": 0,
        "seed": workload.seed + number,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "50,95,99",
        "result-dir": work,
        "result-filename": RESULT,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [*VLLM, "bench", "serve", *flags, "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]


def measured_of(results: Sequence[dict[str, Any]], workload: Workload) -> Measured:
    """The generator's results, one per round, as our records.

    Raises:
        MeasurementFailed: see ``load_of``; or the figures of single requests are missing.
    """
    rounds = tuple(load_of(result, workload) for result in results)
    try:
        requests = [each for number, result in enumerate(results) for each in _requests(number, result)]
        gaps_ms = [1000 * gap for result in results for gaps in result["itls"] for gap in gaps]
    except (LookupError, TypeError, ValueError) as error:
        raise MeasurementFailed(f"the load generator's result is not usable: {error}") from error
    if len(requests) != sum(each.requests for each in rounds):
        raise MeasurementFailed(f"the load generator told of {len(requests)} requests only")
    points = {name: [each[name] for each in requests] for name in ("ttft_ms", "tpot_ms", "e2el_ms")}
    together = Load(
        concurrency=workload.concurrency,
        requests=sum(each.requests for each in rounds),
        requests_completed=sum(each.requests_completed for each in rounds),
        requests_failed=sum(each.requests_failed for each in rounds),
        duration_s=sum(each.duration_s for each in rounds),
        prompt_tokens=sum(each.prompt_tokens for each in rounds),
        output_tokens=sum(each.output_tokens for each in rounds),
        requests_per_s=fmean(each.requests_per_s for each in rounds),
        output_tokens_per_s=fmean(each.output_tokens_per_s for each in rounds),
        itl_ms=_over(gaps_ms),
        **{name: _over(values) for name, values in points.items()},
    )
    return Measured(together, rounds, requests)


def _requests(number: int, result: dict[str, Any]) -> Iterator[dict[str, float]]:
    for ttft_s, gaps_s, tokens in zip(result["ttfts"], result["itls"], result["output_lens"], strict=True):
        rest_s = sum(gaps_s)
        figures = {"ttft_ms": ttft_s, "tpot_ms": rest_s / max(1, tokens - 1), "e2el_ms": ttft_s + rest_s}
        yield {
            "round": number,
            **{name: round(1000 * each, 3) for name, each in figures.items()},
            "output_tokens": tokens,
        }


def _over(values: Sequence[float]) -> Percentiles:
    import numpy as np

    p50, p95, p99 = (float(each) for each in np.percentile(values or [0.0], [50, 95, 99]))
    return Percentiles(mean=fmean(values or [0.0]), p50=p50, p95=p95, p99=p99)


def load_of(result: dict[str, Any], workload: Workload) -> Load:
    """The generator's result as our record.

    Raises:
        MeasurementFailed: a request failed (the figures of the others would flatter the server), or a figure is
            missing or not finite.
    """
    failed, completed = int(result.get("failed", 0)), int(result.get("completed", 0))
    if failed or completed != workload.requests:
        reason = next(
            (line.strip() for text in result.get("errors", []) for line in text.splitlines()[-1:] if line), ""
        )
        raise MeasurementFailed(
            f"{workload.requests - completed} of {workload.requests} requests failed"
            + (f": {reason}" if reason else ""),
            hint="see vLLM's log",
        )
    try:
        load = Load(
            concurrency=workload.concurrency,
            requests=workload.requests,
            requests_completed=completed,
            requests_failed=failed,
            duration_s=_finite(result, "duration"),
            prompt_tokens=int(result["total_input_tokens"]),
            output_tokens=int(result["total_output_tokens"]),
            requests_per_s=_finite(result, "request_throughput"),
            output_tokens_per_s=_finite(result, "output_throughput"),
            ttft_ms=_percentiles(result, "ttft"),
            tpot_ms=_percentiles(result, "tpot"),
            itl_ms=_percentiles(result, "itl"),
            e2el_ms=_percentiles(result, "e2el"),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise MeasurementFailed(f"the load generator's result is not usable: {error}") from error
    if load.output_tokens != workload.requests * workload.output_tokens:
        expected = workload.requests * workload.output_tokens
        raise MeasurementFailed(f"the server gave {load.output_tokens} tokens, not the {expected} asked for")
    return load


def _percentiles(result: dict[str, Any], metric: str) -> Percentiles:
    return Percentiles(
        mean=_finite(result, f"mean_{metric}_ms"),
        **{point: _finite(result, f"{point}_{metric}_ms") for point in ("p50", "p95", "p99")},
    )


def _finite(result: dict[str, Any], name: str) -> float:
    value = float(result[name])
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    return value
