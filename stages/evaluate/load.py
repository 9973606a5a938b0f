"""Latency and throughput under the workload's load, measured by ``vllm bench serve``.

It is preferred to separate load generators (guidellm, genai-perf) because it comes with vLLM, so nothing else has to be
installed and its figures are those that vLLM's users quote; because its result is one small JSON file; and because it
takes the least CPU time from a server on the same machine.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stages.evaluate.preloaded import Preloaded
from stages.evaluate.trace import Trace
from stages.parts.base.errors import ConfigError, MeasurementFailed
from stages.parts.base.settings import Serving, Workload
from stages.parts.engine.log import ServerLog
from stages.parts.engine.server import Server
from stages.parts.samples.lines import LoadRun, LoadSamples, Phase, TimedRequest

RESULT: Final = "load.json"
TRACE: Final = "trace.jsonl"
SWEEP_REQUESTS: Final = 24
SWEEP_REQUESTS_PER_USER: Final = 4


def check_lengths(directory: Path, workload: Workload, serving: Serving, trace: Trace | None) -> None:
    """Refuse a workload that does not fit the model, before anything is started.

    Raises:
        ConfigError: prompt and answer together are longer than the model or the server allows.
    """
    config = json.loads((directory / "config.json").read_text())
    known = config.get("text_config", config).get("max_position_embeddings")
    limits = [each for each in (serving.max_model_len, known) if isinstance(each, int)]
    check_fits(workload, trace, min(limits, default=sys.maxsize))


def check_fits(workload: Workload, trace: Trace | None, max_model_len: int) -> None:
    """Raises: ConfigError."""
    if trace:
        return trace.check_fits(max_model_len)
    prompt, answer = workload.longest()
    if prompt + answer > max_model_len:
        raise ConfigError(
            f"workload {workload.name!r} needs {prompt} + {answer} = {prompt + answer} tokens, "
            f"but the model is served with {max_model_len}",
            hint="lower prompt_tokens, output_tokens or their spread, or raise serving.max_model_len if the model "
            "allows it",
        )
    return None


@dataclass(frozen=True)
class PlannedRun:
    """One run of the load generator before it starts."""

    phase: Phase
    number: int
    """The round over all starts of the server, from 0; in the sweep the concurrency."""
    restart: int
    concurrency: int
    requests: int
    seed: int
    start: int
    """The trace's request to begin with."""


def planned_rounds(workload: Workload, restart: int) -> list[PlannedRun]:
    """The rounds of one start of the server. All variants get the same prompts and arrivals; each round has others."""
    first = restart * workload.rounds
    return [
        PlannedRun(
            phase="round",
            number=number,
            restart=restart,
            concurrency=workload.concurrency,
            requests=workload.requests,
            seed=workload.seed + number,
            start=number * workload.requests,
        )
        for number in range(first, first + workload.rounds)
    ]


def planned_sweep(workload: Workload) -> list[PlannedRun]:
    """The further concurrencies, measured at the first start, with fewer requests where fewer are in flight."""
    rounds = workload.rounds * workload.restarts
    return [
        PlannedRun(
            phase="sweep",
            number=concurrency,
            restart=0,
            concurrency=concurrency,
            requests=max(SWEEP_REQUESTS, SWEEP_REQUESTS_PER_USER * concurrency),
            seed=workload.seed + rounds + index,
            start=rounds * workload.requests,
        )
        for index, concurrency in enumerate(workload.sweep)
    ]


def run_load(
    generator: Preloaded,
    server: Server,
    directory: Path,
    workload: Workload,
    planned: PlannedRun,
    trace: Trace | None,
    log: Path,
) -> LoadSamples:
    """Send the requests of a run, after a warm-up, and time every token.

    The prompts are those of the trace, or random tokens of the workload's lengths, different for each request so that
    no prefix is cached. Every answer has exactly the requested length. The prompts are seeded: every variant gets the
    same ones.

    Raises:
        MeasurementFailed: a request failed, or a figure is missing or not finite.
        ServerFailed: the server ended.
    """
    with tempfile.TemporaryDirectory(prefix="slipway-load-") as folder:
        work = Path(folder)
        lengths = trace.write(work / TRACE, planned.start, planned.requests) if trace else None
        call = {"arguments": command(server, directory, workload, planned, work)}
        status = generator.call(server, call, log)
        try:
            result = json.loads((work / RESULT).read_text())
        except (OSError, ValueError) as error:
            why = ServerLog(log).cause()
            raise MeasurementFailed(f"the load generator failed ({status}): {why}", hint=f"see {log}") from error
    return samples_of(result, workload, planned, lengths)


def command(server: Server, directory: Path, workload: Workload, planned: PlannedRun, work: Path) -> list[str]:
    options = {
        "backend": "openai",
        "base-url": server.url,
        "endpoint": "/v1/completions",
        "model": server.name,
        "tokenizer": directory,
        "num-prompts": planned.requests,
        "num-warmups": workload.warmup_requests,
        "temperature": 0,
        "seed": planned.seed,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "50,95,99",
        "result-dir": work,
        "result-filename": RESULT,
    }
    if workload.trace:
        options |= {"dataset-name": "custom", "dataset-path": work / TRACE, "custom-output-len": -1}
    else:
        spread = {"input": workload.prompt_spread, "output": workload.output_spread}
        options |= {
            "dataset-name": "random",
            "random-input-len": workload.prompt_tokens,
            "random-output-len": workload.output_tokens,
            "random-range-ratio": json.dumps(spread),
        }
    if workload.request_rate_per_s and planned.phase == "round":
        # Without a limit on concurrency: a user who arrives while others wait also waits, and that time counts.
        options["request-rate"] = workload.request_rate_per_s
    else:
        options["max-concurrency"] = planned.concurrency
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    flags += ["--disable-shuffle", "--skip-chat-template"] if workload.trace else []
    return ["bench", "serve", *flags, "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]


def samples_of(
    result: dict[str, Any], workload: Workload, planned: PlannedRun, lengths: list[int] | None
) -> LoadSamples:
    """The generator's result as the samples that all figures are computed from.

    Args:
        lengths: the lengths of the answers that a trace requests; None without a trace.

    Raises:
        MeasurementFailed: a request failed (the others alone would make the server look better than it is); a figure
            is missing or not finite; or an answer does not have the requested length.
    """
    check_complete(result, planned)
    at_a_rate = workload.request_rate_per_s and planned.phase == "round"
    try:
        run = LoadRun(
            restart=planned.restart,
            phase=planned.phase,
            number=planned.number,
            concurrency=int(result["max_concurrent_requests"]) if at_a_rate else planned.concurrency,
            duration_s=_finite("duration", result["duration"]),
        )
        requests = tuple(_timed_requests(run, result))
    except (LookupError, TypeError, ValueError) as error:
        raise MeasurementFailed(f"the load generator's result is not usable: {error}") from error
    if len(requests) != planned.requests:
        raise MeasurementFailed(f"the load generator reported only {len(requests)} requests")
    check_answers([each.output_tokens for each in requests], workload, lengths)
    return LoadSamples(run, requests)


def check_complete(result: Mapping[str, Any], planned: PlannedRun) -> None:
    """Raises: MeasurementFailed: requests failed; the message has the first reason."""
    failed, completed = int(result.get("failed", 0)), int(result.get("completed", 0))
    if not failed and completed == planned.requests:
        return
    reason = next((line.strip() for text in result.get("errors", []) for line in text.splitlines()[-1:] if line), "")
    raise MeasurementFailed(
        f"{planned.requests - completed} of {planned.requests} requests failed" + (f": {reason}" if reason else ""),
        hint="see vLLM's log",
    )


def check_answers(found: Sequence[int], workload: Workload, lengths: list[int] | None) -> None:
    """Raises: MeasurementFailed: an answer does not have the requested length, so its times say little."""
    mean, spread = workload.output_tokens or 0, workload.output_spread
    shortest, longest = max(1, math.floor(mean * (1 - spread))), math.ceil(mean * (1 + spread))
    for number, tokens in enumerate(found):
        low, high = (lengths[number], lengths[number]) if lengths else (shortest, longest)
        if not low <= tokens <= high:
            asked = str(low) if low == high else f"{low} to {high}"
            raise MeasurementFailed(f"the server gave {tokens} tokens, not the {asked} asked for")


def _timed_requests(run: LoadRun, result: dict[str, Any]) -> Iterator[TimedRequest]:
    columns = (result[name] for name in ("start_times", "ttfts", "itls", "input_lens", "output_lens"))
    first_s = min(result["start_times"], default=0.0)
    for start_s, ttft_s, gaps_s, prompt, answer in zip(*columns, strict=True):
        rest_s = sum(gaps_s)
        yield TimedRequest(
            restart=run.restart,
            phase=run.phase,
            number=run.number,
            start_s=round(start_s - first_s, 6),
            ttft_ms=_milliseconds("ttft", ttft_s),
            tpot_ms=_milliseconds("tpot", rest_s / max(1, answer - 1)),
            e2el_ms=_milliseconds("e2el", ttft_s + rest_s),
            itl_ms=tuple(_milliseconds("itl", gap_s) for gap_s in gaps_s),
            prompt_tokens=int(prompt),
            output_tokens=int(answer),
        )


def _milliseconds(name: str, seconds: float) -> float:
    """Raises: ValueError."""
    return round(1000 * _finite(name, seconds), 3)


def _finite(name: str, value: float) -> float:
    """Raises: ValueError."""
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    return value
