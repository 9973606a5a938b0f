"""Every number of an evaluation that follows from its raw samples, computed from them alone.

The figures are made by these functions when they are measured, and again when a decision is verified, so that both
come to the same. One call of the load generator has a line of its own (``concurrency`` and ``duration_s``), which tells
what the lines of its requests can't.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Divergence

if TYPE_CHECKING:
    pass
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    pass
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from stages.parts.records.evaluation import Goodput, Load, Percentiles, TaskScore

Z_95: Final = 1.959964
RESAMPLES: Final = 1000
SEED: Final = 0

Line = Mapping[str, Any]
Point = tuple[Line, Sequence[Line]]
"""One call of the load generator: its own line, and those of its requests."""


def point_load(point: Point) -> Load:
    """Raises: KeyError: a line lacks a figure."""
    total, requests = point
    duration_s = total["duration_s"]
    tokens = sum(each["output_tokens"] for each in requests)
    return Load(
        concurrency=total["concurrency"],
        requests=len(requests),
        duration_s=duration_s,
        prompt_tokens=sum(each["prompt_tokens"] for each in requests),
        output_tokens=tokens,
        requests_per_s=len(requests) / duration_s,
        output_tokens_per_s=tokens / duration_s,
        **percentiles_of(requests),
    )


def whole_load(rounds: Sequence[Point]) -> Load:
    """All rounds as one: percentiles over all requests, the rounds' mean rates."""
    loads = [point_load(each) for each in rounds]
    return Load(
        concurrency=max(each.concurrency for each in loads),
        requests=sum(each.requests for each in loads),
        duration_s=sum(each.duration_s for each in loads),
        prompt_tokens=sum(each.prompt_tokens for each in loads),
        output_tokens=sum(each.output_tokens for each in loads),
        requests_per_s=fmean(each.requests_per_s for each in loads),
        output_tokens_per_s=fmean(each.output_tokens_per_s for each in loads),
        **percentiles_of([line for _, requests in rounds for line in requests]),
    )


def goodput_of(rounds: Sequence[Point], ttft_ms: float, tpot_ms: float) -> Goodput:
    """What of all rounds met the targets (Zhong et al., DistServe, 2024); rates are the rounds' means."""
    good = [(total, met(requests, ttft_ms, tpot_ms)) for total, requests in rounds]
    return Goodput(
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        share=sum(len(lines) for _, lines in good) / sum(len(requests) for _, requests in rounds),
        requests_per_s=fmean(len(lines) / total["duration_s"] for total, lines in good),
        output_tokens_per_s=fmean(
            sum(each["output_tokens"] for each in lines) / total["duration_s"] for total, lines in good
        ),
    )


def met(requests: Iterable[Line], ttft_ms: float, tpot_ms: float) -> list[Line]:
    """The requests within both targets."""
    return [each for each in requests if each["ttft_ms"] <= ttft_ms and each["tpot_ms"] <= tpot_ms]


def percentiles_of(requests: Sequence[Line]) -> dict[str, Percentiles]:
    """Of each time, by its name in ``Load``. ``itl_ms`` of a request is the list of its gaps between tokens."""
    single = {name: over([each[name] for each in requests]) for name in ("ttft_ms", "tpot_ms", "e2el_ms")}
    return {**single, "itl_ms": over([gap for each in requests for gap in each["itl_ms"]])}


def over(values: Iterable[float]) -> Percentiles:
    """Mean and percentiles; zeros where there are no values (an answer of one token has no gaps)."""
    import numpy as np

    given = list(values) or [0.0]
    p50, p95, p99 = (float(each) for each in np.percentile(given, [50, 95, 99]))
    return Percentiles(mean=fmean(given), p50=p50, p95=p95, p99=p99)


def task_score(score: TaskScore, lines: Sequence[Line]) -> TaskScore | None:
    """The score of a task from its items, the mean over the starts of the server; None if it has none.

    ``metrics`` stays as lm-eval told it, and so does the interval of a group's accuracy, which lm-eval pools from its
    tasks' standard errors.
    """
    starts: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        if line.get("task") == score.task:
            starts[line.get("restart", 0)].append(line)
    if not starts:
        return None
    figure = _perplexity if score.kind == "perplexity" else _accuracy
    figures = [figure(items) for _, items in sorted(starts.items())]
    means = {name: fmean(each[name] for each in figures) for name in figures[0]}
    if score.kind == "accuracy" and "subtask" in starts[min(starts)][0]:
        del means["low"], means["high"]
    return score.model_copy(update={**means, "items": len(starts[min(starts)])})


def _accuracy(items: Sequence[Line]) -> dict[str, float]:
    values = [float(each["correct"]) for each in items]
    value = fmean(values, [float(each.get("weight", 1.0)) for each in items])
    reach = Z_95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"value": value, "low": max(0.0, value - reach), "high": min(1.0, value + reach), "score": value}


def _perplexity(items: Sequence[Line]) -> dict[str, float]:

    weighed = [(each, float(each.get("weight", 1.0))) for each in items]
    documents = [(float(each["loglikelihood"]) * weight, float(each["bytes"]) * weight) for each, weight in weighed]
    likelihood, size = (sum(each) for each in zip(*documents, strict=True))
    value = -likelihood / size / math.log(2)
    low, high = bits_per_byte_interval(documents)
    return {"value": value, "low": low, "high": high, "score": 2**-value}


def bits_per_byte_interval(documents: list[tuple[float, float]]) -> tuple[float, float]:
    """95 % interval of the corpus's bits per byte: percentile bootstrap over documents (Efron 1979), seeded.

    lm-eval gives no standard error for it.
    """
    import numpy as np

    loglikelihoods, sizes = np.array(documents, dtype=float).T
    chosen = np.random.default_rng(SEED).integers(len(sizes), size=(RESAMPLES, len(sizes)))
    resampled = -loglikelihoods[chosen].sum(axis=1) / sizes[chosen].sum(axis=1) / math.log(2)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)


def limited(evaluation: Evaluation) -> dict[str, float | None]:
    """What a profile's constraints can limit (``scoring.constraints.MEASURES``), as far as it was measured."""
    load = evaluation.load
    return {
        "ttft_p95_ms": load.ttft_ms.p95,
        "tpot_p95_ms": load.tpot_ms.p95,
        "e2el_p95_ms": load.e2el_ms.p95,
        "goodput_share": evaluation.goodput.share if evaluation.goodput else None,
    }


def fidelity_limits(name: str, reference: str, found: Mapping[str, Divergence]) -> dict[str, float | None]:
    """What of it a profile's constraints can limit; the reference is not apart from itself."""
    if name == reference:
        return {"kl_divergence": 0.0, "top1_agreement": 1.0}
    apart = found.get(name)
    return {
        "kl_divergence": apart.kl if apart else None,
        "top1_agreement": apart.top1_agreement if apart else None,
    }
