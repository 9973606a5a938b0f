"""Every figure of an evaluation that follows from its raw samples, computed from them alone.

These functions compute the figures when a variant is measured, and again when a decision is verified, so both give the
same values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any, Final

import numpy as np

from scoring.student import Z_95
from stages.parts.records.evaluation import Goodput, Intervals, Load, Percentiles, TaskScore
from stages.parts.samples.capacity import interval, within
from stages.parts.samples.lines import AccuracyItem, LoadSamples, PerplexityItem, Samples, TimedRequest

RESAMPLES: Final = 1000
SEED: Final = 0


def load_of(samples: LoadSamples) -> Load:
    run, requests = samples.run, samples.requests
    return Load(
        rate_per_s=run.rate_per_s,
        concurrency=run.concurrency,
        requests=len(requests),
        duration_s=run.duration_s,
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        output_tokens=sum(request.output_tokens for request in requests),
        requests_per_s=len(requests) / run.duration_s,
        output_tokens_per_s=samples.output_tokens_per_s,
        ttft_ms=percentiles([request.ttft_ms for request in requests]),
        tpot_ms=percentiles([request.tpot_ms for request in requests]),
        e2el_ms=percentiles([request.e2el_ms for request in requests]),
        itl_ms=percentiles([gap for request in requests for gap in request.itl_ms]),
    )


def pooled_load(rounds: Sequence[LoadSamples]) -> Load:
    """Summarize all rounds: percentiles over all requests, and the mean of the rounds' rates."""
    loads = [load_of(run) for run in rounds]
    pooled = load_of(LoadSamples(rounds[0].run, tuple(request for run in rounds for request in run.requests)))
    changed: dict[str, Any] = {
        "concurrency": max(load.concurrency for load in loads),
        "duration_s": sum(load.duration_s for load in loads),
        "requests_per_s": fmean(load.requests_per_s for load in loads),
        "output_tokens_per_s": fmean(load.output_tokens_per_s for load in loads),
    }
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        changed[name] = getattr(pooled, name).model_copy(update={"intervals": _intervals(rounds, name)})
    return pooled.model_copy(update=changed)


def prompt_tokens_per_s(runs: Iterable[LoadSamples]) -> float | None:
    """Compute the tokens of prompts per second of the time in which any prompt waited or was being read, in the run in
    which they were the most; None without requests. That is how fast waiting prompts become fewer, while answers are
    generated beside. It is rather too low: what does not depend on a prompt's length takes time, too, and at the
    beginning of a run requests are being read that do not count."""
    return max((_read_per_s(run.requests) for run in runs if run.requests), default=None)


def _read_per_s(requests: Iterable[TimedRequest]) -> float:
    tokens, seconds, read_until = 0, 0.0, -math.inf
    for request in sorted(requests, key=lambda request: request.start_s):
        end = request.start_s + request.ttft_ms / 1000
        tokens += request.prompt_tokens
        seconds += max(0.0, end - max(request.start_s, read_until))
        read_until = max(read_until, end)
    return tokens / seconds if seconds else 0.0


def _intervals(rounds: Sequence[LoadSamples], name: str) -> Intervals:
    """Compute the intervals of the percentiles of one time of the requests."""
    starts: dict[int, list[float]] = defaultdict(list)
    for run in rounds:
        starts[run.run.restart] += [getattr(request, name) for request in run.requests]
    if len(starts) == 1:
        ordered = sorted(starts.popitem()[1])
        return Intervals(p50=_by_ranks(ordered, 0.5), p95=_by_ranks(ordered, 0.95), p99=_by_ranks(ordered, 0.99))
    by_start = [percentiles(start) for start in starts.values()]
    p50, p95, p99 = (interval([getattr(start, share) for start in by_start]) for share in ("p50", "p95", "p99"))
    return Intervals(p50=p50, p95=p95, p99=p99)


def _by_ranks(ordered: Sequence[float], share: float) -> tuple[float, float]:
    """Compute the 95 % interval of a percentile by order statistics (Conover 1999, Practical Nonparametric Statistics,
    3.2)."""
    size = len(ordered)
    middle, reach = size * share, Z_95 * math.sqrt(size * share * (1 - share))
    low, high = (min(max(math.ceil(rank), 1), size) for rank in (middle - reach, middle + reach + 1))
    return ordered[low - 1], ordered[high - 1]


def goodput_of(rounds: Sequence[LoadSamples], ttft_ms: float, tpot_ms: float) -> Goodput:
    """Count the requests that met the targets (Zhong et al., DistServe, 2024); rates are the mean over rounds."""
    good = [(run.run.duration_s, [each for each in run.requests if within(each, ttft_ms, tpot_ms)]) for run in rounds]
    return Goodput(
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        share=sum(len(requests) for _, requests in good) / sum(len(run.requests) for run in rounds),
        requests_per_s=fmean(len(requests) / duration_s for duration_s, requests in good),
        output_tokens_per_s=fmean(
            sum(request.output_tokens for request in requests) / duration_s for duration_s, requests in good
        ),
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Compute mean and percentiles; zeros where there are no values (an answer of one token has no gaps)."""
    values = values or [0.0]
    p50, p95, p99 = map(float, np.percentile(values, [50, 95, 99]))
    return Percentiles(mean=fmean(values), p50=p50, p95=p95, p99=p99)


def task_score(score: TaskScore, samples: Samples) -> TaskScore | None:
    """Compute the score of a task from its items; None without items.

    ``metrics`` stays as lm-eval reported it, and so does the interval of a group's accuracy, which lm-eval pools from
    the standard errors of its tasks.
    """
    items = [item for item in samples.items if item.task == score.task]
    answers = [item for item in items if isinstance(item, AccuracyItem)]
    texts = [item for item in items if isinstance(item, PerplexityItem)]
    if score.kind == "accuracy" and answers:
        values = [item.correct for item in answers]
        value = fmean(values, [item.weight for item in answers])
        figures = {"value": value, "score": value, "items": len(answers)}
        if not answers[0].subtask:
            reach = Z_95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
            figures |= {"low": max(0.0, value - reach), "high": min(1.0, value + reach)}
        return score.model_copy(update=figures)
    if score.kind == "perplexity" and texts:
        likelihood = sum(item.loglikelihood * item.weight for item in texts)
        value = -likelihood / sum(item.bytes * item.weight for item in texts) / math.log(2)
        low, high = bits_per_byte_interval(texts)
        figures = {"value": value, "low": low, "high": high, "score": 2**-value, "items": len(texts)}
        return score.model_copy(update=figures)
    return None


def bits_per_byte_interval(items: Sequence[PerplexityItem]) -> tuple[float, float]:
    """Compute the 95 % interval of the corpus's bits per byte, for which lm-eval gives no standard error: seeded
    percentile bootstrap over documents (Efron 1979)."""
    loglikelihoods = np.array([item.loglikelihood * item.weight for item in items])
    sizes = np.array([item.bytes * item.weight for item in items])
    drawn = np.random.default_rng(SEED).integers(len(sizes), size=(RESAMPLES, len(sizes)))
    resampled = -loglikelihoods[drawn].sum(axis=1) / sizes[drawn].sum(axis=1) / math.log(2)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)
