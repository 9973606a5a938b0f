"""One call of ``vllm bench serve``: requests at a rate, or with the same number in flight all the time.

It comes with vLLM, its figures are those that vLLM's users quote, and it takes the least CPU time from a server on the
same machine. Neither its own sweep nor guidellm's knows targets, so the search is ours. Of the data sets,
``timed_trace`` is used: with ``random``, equal arrivals mean equal prompts, which a server would answer from its prefix
cache when the next rate is tried.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stages.evaluate.generator import ENDED_EARLY
from stages.evaluate.preloaded import Preloaded
from stages.evaluate.trace import Trace
from stages.parts.base.errors import MeasurementFailed
from stages.parts.base.workload import Workload
from stages.parts.samples.lines import TimedRequest
from stages.parts.vllm.server import Server
from stages.parts.vllm.server_log import ServerLog

RESULT: Final = "load.json"
REQUESTS: Final = "requests.jsonl"
SEEDED: Final = 10**12
"""More prompts than are numbered for one seed."""


@dataclass(frozen=True)
class LoadTarget:
    """A server under load, and what generates it."""

    generator: Preloaded
    server: Server
    tokenizer: Path
    """The model's directory."""
    workload: Workload
    trace: Trace | None
    log: Path


@dataclass(frozen=True)
class Limits:
    """A run ends early as soon as more than *allowed* of the requests that count have taken longer than a limit."""

    ttft_ms: float
    tpot_ms: float
    allowed: int
    first: int
    """The first request that counts, and the first after it that does not."""
    end: int


@dataclass(frozen=True)
class Call:
    """What is sent. Without a trace, the lengths follow from ``seed``, as the arrivals always do."""

    requests: int
    seed: int
    first: int
    """The number of the first prompt; prompts of the same number are the same. In a trace, the request to begin
    with."""
    rate_per_s: float | None = None
    concurrency: int | None = None
    """Either a rate, or the number in flight."""
    warmups: int = 0
    limits: Limits | None = None


def send(target: LoadTarget, call: Call) -> list[TimedRequest] | None:
    """Send the requests and time every token of their answers, which have exactly the requested length.

    Returns:
        The requests in the order of their arrival, not labelled yet; None if the run was ended early.

    Raises:
        MeasurementFailed: a request failed, or a figure is missing or not finite.
        ServerFailed: the server ended.
    """
    with tempfile.TemporaryDirectory(prefix="slipway-load-") as folder:
        work = Path(folder)
        lengths = write_requests(work / REQUESTS, target, call)
        limits = vars(call.limits) if call.limits else None
        job = {"arguments": command(target, call, work), "limits": limits}
        status = target.generator.call(target.server, job, target.log)
        if status == ENDED_EARLY and limits:
            return None
        try:
            result = json.loads((work / RESULT).read_text())
        except (OSError, ValueError) as error:
            why = ServerLog(target.log).cause()
            raise MeasurementFailed(f"the load generator failed ({status}): {why}", hint=f"see {target.log}") from error
    return timed_requests(result, lengths)


def write_requests(path: Path, target: LoadTarget, call: Call) -> list[int]:
    """Write what is sent in the generator's form; return the lengths of the answers."""
    if target.trace:
        return target.trace.write(path, call.first, call.requests)
    drawn = lengths(target.workload, call.seed, call.requests)
    first = target.workload.seed * SEEDED + call.first
    lines = (
        {"timestamp": 0, "input_length": prompt, "output_length": answer, "hash_ids": [first + place]}
        for place, (prompt, answer) in enumerate(drawn)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [answer for _, answer in drawn]


def lengths(workload: Workload, seed: int, count: int) -> list[tuple[int, int]]:
    """Draw the tokens of the prompts and answers; more requests begin with the same."""
    drawn = random.Random(f"lengths {seed}")
    spans = [
        (max(1, math.floor(mean * (1 - spread))), math.ceil(mean * (1 + spread)))
        for mean, spread in (
            (workload.prompt_tokens or 1, workload.prompt_spread),
            (workload.output_tokens or 1, workload.output_spread),
        )
    ]
    return [(drawn.randint(*spans[0]), drawn.randint(*spans[1])) for _ in range(count)]


def command(target: LoadTarget, call: Call, work: Path) -> list[str]:
    options = {
        "backend": "openai",
        "base-url": target.server.url,
        "endpoint": "/v1/completions",
        "model": target.server.name,
        "tokenizer": target.tokenizer,
        "dataset-path": work / REQUESTS,
        "num-prompts": call.requests,
        "num-warmups": call.warmups,
        "temperature": 0,
        "seed": call.seed,
        "result-dir": work,
        "result-filename": RESULT,
    }
    if target.trace:
        options |= {"dataset-name": "custom", "custom-output-len": -1}
        flags = ["--disable-shuffle", "--skip-chat-template"]
    else:
        # One hash stands for a whole prompt.
        options |= {"dataset-name": "timed_trace", "timed-trace-chunk-hash-size": target.workload.longest()[0]}
        flags = ["--no-self-timed"]
    if call.rate_per_s:
        # Without a limit on concurrency: a user who arrives while others wait also waits, and that time counts.
        options["request-rate"] = call.rate_per_s
    else:
        options["max-concurrency"] = call.concurrency or 1
    flags += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return ["bench", "serve", *flags, "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]


def timed_requests(result: dict[str, Any], answer_tokens: Sequence[int]) -> list[TimedRequest]:
    """Read the generator's result. All is refused if a request failed, since the others alone would make the server
    look better than it is, or if an answer does not have its length in *answer_tokens*."""
    count, completed = len(answer_tokens), int(result.get("completed", 0))
    if int(result.get("failed", 0)) or completed != count:
        last_lines = (line.strip() for text in result.get("errors", []) for line in text.splitlines()[-1:] if line)
        why = f": {reason}" if (reason := next(last_lines, "")) else ""
        raise MeasurementFailed(f"{count - completed} of {count} requests failed{why}", hint="see vLLM's log")
    try:
        requests = list(_timed(result))
    except (LookupError, TypeError, ValueError) as error:
        raise MeasurementFailed(f"the load generator's result is not usable: {error}") from error
    if len(requests) != count:
        raise MeasurementFailed(f"the load generator reported only {len(requests)} requests")
    for request, tokens in zip(requests, answer_tokens, strict=True):
        if request.output_tokens != tokens:
            raise MeasurementFailed(f"the server gave {request.output_tokens} tokens, not the {tokens} asked for")
    return requests


def _timed(result: dict[str, Any]) -> Iterator[TimedRequest]:
    columns = (result[name] for name in ("start_times", "ttfts", "itls", "input_lens", "output_lens"))
    first_s = min(result["start_times"], default=0.0)
    for start_s, ttft_s, gaps_s, prompt, answer in zip(*columns, strict=True):
        rest_s = sum(gaps_s)
        yield TimedRequest(
            restart=0,
            phase="round",
            number=0,
            start_s=round(start_s - first_s, 6),
            ttft_ms=_milliseconds("ttft", ttft_s),
            tpot_ms=_milliseconds("tpot", rest_s / max(1, answer - 1)),
            e2el_ms=_milliseconds("e2el", ttft_s + rest_s),
            itl_ms=tuple(_milliseconds("itl", gap_s) for gap_s in gaps_s),
            prompt_tokens=int(prompt),
            output_tokens=int(answer),
        )


def _milliseconds(name: str, seconds: float) -> float:
    """Convert seconds; ValueError if they are not finite."""
    if not math.isfinite(seconds):
        raise ValueError(f"{name} is {seconds}")
    return round(1000 * seconds, 3)
