from __future__ import annotations

import math

import numpy as np
import pytest

from stages.parts.records.evaluation import TaskScore
from stages.parts.samples.figures import goodput_of, load_of, pooled_load, prompt_tokens_per_s, task_score
from stages.parts.samples.lines import AccuracyItem, Item, LoadRun, LoadSamples, PerplexityItem, Samples, TimedRequest


def request(ttft_ms: float, tpot_ms: float, tokens: int = 3) -> TimedRequest:
    gaps = (tpot_ms,) * (tokens - 1)
    return TimedRequest(
        restart=0,
        phase="round",
        number=0,
        start_s=0.0,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        e2el_ms=ttft_ms + sum(gaps),
        itl_ms=gaps,
        prompt_tokens=5,
        output_tokens=tokens,
    )


def one_round(duration_s: float, *requests: TimedRequest) -> LoadSamples:
    run = LoadRun(restart=0, phase="round", number=0, concurrency=2, duration_s=duration_s)
    return LoadSamples(run, requests)


SLOW = one_round(2.0, request(100, 10), request(300, 30))
FAST = one_round(1.0, request(100, 10), request(100, 20))


def samples(*items: Item) -> Samples:
    return Samples(items=items)


def test_a_round_is_counted_and_divided_by_its_time():
    load = load_of(SLOW)
    assert (load.requests, load.prompt_tokens, load.output_tokens) == (2, 10, 6)
    assert (load.requests_per_s, load.output_tokens_per_s) == (1.0, 3.0)
    assert (load.e2el_ms.mean, load.e2el_ms.p50, load.ttft_ms.p95) == pytest.approx((240, 240, 290))
    assert load.itl_ms.mean == pytest.approx(20)


def test_prompts_that_wait_at_the_same_time_are_read_faster_than_each_alone():
    def waits(*spans: tuple[float, float]) -> LoadSamples:
        timed = [request(1000 * (end - start), 1).model_copy(update={"start_s": start}) for start, end in spans]
        return one_round(9.0, *timed)

    apart, together = waits((0.0, 0.5), (2.0, 2.5)), waits((1.0, 1.4), (0.0, 0.5), (0.2, 0.4), (0.4, 0.6))
    assert prompt_tokens_per_s([apart]) == pytest.approx(2 * 5 / 1.0)
    assert prompt_tokens_per_s([together]) == pytest.approx(4 * 5 / 1.0)
    assert prompt_tokens_per_s([apart, together, one_round(1.0)]) == pytest.approx(20)
    assert prompt_tokens_per_s([one_round(1.0)]) is None


def test_rates_of_all_rounds_are_their_mean_and_percentiles_are_over_all_requests():
    load = pooled_load([SLOW, FAST])
    assert (load.requests, load.duration_s, load.output_tokens_per_s) == (4, 3.0, 4.5)
    assert load.ttft_ms.mean == pytest.approx(150)
    assert load.e2el_ms.p50 == pytest.approx(np.percentile([120, 360, 120, 140], 50))


def test_goodput_counts_requests_that_met_both_targets():
    found = goodput_of([SLOW, FAST], ttft_ms=200, tpot_ms=15)
    assert found.share == 0.5
    # One of 3 tokens in 2 s, and one in 1 s.
    assert (found.requests_per_s, found.output_tokens_per_s) == pytest.approx((0.75, 2.25))


def told(kind: str) -> TaskScore:
    return TaskScore.model_validate(
        {"task": "t", "kind": kind, "value": 0, "low": 0, "high": 0, "score": 0, "items": 0, "metrics": {"acc": 1.0}}
    )


def test_accuracy_is_the_mean_over_items():
    items = [AccuracyItem(restart=0, task="t", doc_id=item, correct=float(item < 6)) for item in range(10)]
    found = task_score(told("accuracy"), samples(*items))
    assert found is not None
    assert (found.value, found.score, found.items) == pytest.approx((0.6, 0.6, 10))
    assert found.value - found.low == pytest.approx(1.959964 * math.sqrt(0.6 * 0.4 / 9))


def test_bits_per_byte_weigh_texts_by_their_bytes():
    documents = [
        PerplexityItem(restart=0, task="t", doc_id=0, loglikelihood=-20 * math.log(2), bytes=10),
        PerplexityItem(restart=0, task="t", doc_id=1, loglikelihood=-10 * math.log(2), bytes=20),
        PerplexityItem(restart=0, task="another", doc_id=0, loglikelihood=-1e9, bytes=1),
    ]
    found = task_score(told("perplexity"), samples(*documents))
    assert found is not None
    assert (found.value, found.score) == pytest.approx((1.0, 0.5))
    assert (found.low, found.high) == pytest.approx((0.5, 2.0))


def test_a_task_without_items_is_not_recomputed():
    assert task_score(told("accuracy"), samples()) is None
