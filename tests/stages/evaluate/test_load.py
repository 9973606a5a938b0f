from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stages.evaluate.load import check_lengths, planned_rounds, planned_sweep, samples_of
from stages.parts.base.errors import ConfigError, MeasurementFailed
from stages.parts.base.settings import Serving, Workload
from stages.parts.samples.figures import goodput_of, load_of, pooled_load
from stages.parts.samples.lines import LoadRun, TimedRequest

WORKLOAD = Workload(
    name="w", prompt_tokens=100, output_tokens=20, concurrency=2, requests=3, quality_tasks=("arc_easy",)
)
FIRST = planned_rounds(WORKLOAD, 0)[0]


def generated(**changed: Any) -> dict[str, Any]:
    """What ``vllm bench serve`` writes: in seconds, a request takes 0.1 s to its first token, and 19 × 0.01 s more."""
    told = {"completed": 3, "failed": 0, "errors": ["", "", ""], "duration": 1.5, "max_concurrent_requests": 7}
    details = {"start_times": [50.0, 50.0, 50.5], "ttfts": [0.1, 0.1, 0.1], "itls": [[0.01] * 19] * 3}
    return told | details | {"input_lens": [100, 101, 100], "output_lens": [20, 20, 20]} | changed


def test_the_generator_s_figures_are_kept_with_their_units() -> None:
    samples = samples_of(generated(), WORKLOAD, FIRST, None)
    load = load_of(samples)
    assert load.requests == 3
    assert (load.prompt_tokens, load.output_tokens, load.output_tokens_per_s) == (301, 60, 40.0)
    assert (load.ttft_ms.p95, load.tpot_ms.p95, load.itl_ms.mean, load.e2el_ms.p99) == pytest.approx((100, 10, 10, 290))


def test_every_request_has_its_restart_and_round() -> None:
    samples = samples_of(generated(), WORKLOAD, planned_rounds(WORKLOAD, 1)[0], None)
    label: dict[str, Any] = {"restart": 1, "phase": "round", "number": WORKLOAD.rounds}
    assert samples.run == LoadRun(**label, concurrency=2, duration_s=1.5)
    assert samples.requests[2] == TimedRequest(
        **label,
        start_s=0.5,
        ttft_ms=100.0,
        tpot_ms=10.0,
        e2el_ms=290.0,
        itl_ms=(10.0,) * 19,
        prompt_tokens=100,
        output_tokens=20,
    )


def test_failed_requests_fail_the_measurement_with_their_reason() -> None:
    failed = generated(completed=1, failed=2, errors=["", "Traceback\n  ...\nTimeoutError: too slow", "x"])
    with pytest.raises(MeasurementFailed, match="2 of 3 requests failed: TimeoutError: too slow"):
        samples_of(failed, WORKLOAD, FIRST, None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_not_a_number_fails_the_measurement(value: float) -> None:
    with pytest.raises(MeasurementFailed, match=f"ttft is {value}"):
        samples_of(generated(ttfts=[0.1, value, 0.1]), WORKLOAD, FIRST, None)
    with pytest.raises(MeasurementFailed, match=f"duration is {value}"):
        samples_of(generated(duration=value), WORKLOAD, FIRST, None)


@pytest.mark.parametrize("missing", [{"ttfts": []}, {"itls": [[0.01] * 19] * 2}, {"output_lens": None}])
def test_missing_requests_fail_the_measurement(missing: dict[str, Any]) -> None:
    with pytest.raises(MeasurementFailed, match="not usable"):
        samples_of(generated(**missing), WORKLOAD, FIRST, None)


def test_an_answer_shorter_than_requested_fails_the_measurement() -> None:
    with pytest.raises(MeasurementFailed, match="gave 19 tokens, not the 20 asked for"):
        samples_of(generated(output_lens=[20, 19, 20]), WORKLOAD, FIRST, None)


def test_answers_of_drawn_lengths_have_to_lie_within_the_spread() -> None:
    spread = WORKLOAD.model_copy(update={"output_spread": 0.5})
    assert len(samples_of(generated(output_lens=[10, 30, 20]), spread, FIRST, None).requests) == 3
    with pytest.raises(MeasurementFailed, match="gave 31 tokens, not the 10 to 30 asked for"):
        samples_of(generated(output_lens=[10, 31, 20]), spread, FIRST, None)


def test_answers_to_a_trace_have_to_be_as_long_as_it_says() -> None:
    trace = Workload(name="w", trace="t.jsonl", concurrency=2, requests=3, quality_tasks=("arc_easy",))
    assert len(samples_of(generated(output_lens=[5, 6, 7]), trace, FIRST, [5, 6, 7]).requests) == 3
    with pytest.raises(MeasurementFailed, match="gave 6 tokens, not the 5 asked for"):
        samples_of(generated(output_lens=[6, 5, 7]), trace, FIRST, [5, 6, 7])


@pytest.mark.parametrize(("config_tokens", "served_tokens"), [(119, None), (1024, 119)])
def test_a_workload_longer_than_the_model_is_refused(tmp_path: Path, config_tokens: int, served_tokens: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": config_tokens}))
    with pytest.raises(ConfigError, match=r"100 \+ 20 = 120 tokens, but the model is served with 119"):
        check_lengths(tmp_path, WORKLOAD, Serving(max_model_len=served_tokens), None)


def test_a_workload_that_just_fits_is_accepted_and_its_longest_requests_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 120}}))
    check_lengths(tmp_path, WORKLOAD, Serving(), None)
    for changed in ({"output_tokens": 21}, {"prompt_spread": 0.01}):
        with pytest.raises(ConfigError, match="= 121 tokens"):
            check_lengths(tmp_path, WORKLOAD.model_copy(update=changed), Serving(), None)


def test_rounds_are_put_together() -> None:
    slower = {"ttfts": [0.2, 0.2, 0.2], "duration": 3.0}
    rounds = [samples_of(each, WORKLOAD, FIRST, None) for each in (generated(), generated(**slower))]
    load = pooled_load(rounds)
    assert (load.requests, load.output_tokens, load.duration_s, load.output_tokens_per_s) == (6, 120, 4.5, 30.0)
    assert (load.ttft_ms.p50, load.ttft_ms.p99) == pytest.approx((150, 200))
    assert (load.tpot_ms.mean, load.e2el_ms.p99) == pytest.approx((10, 390))


def test_goodput_counts_the_requests_that_meet_every_target() -> None:
    mixed = generated(ttfts=[0.1, 0.3, 0.1], itls=[[0.01] * 19, [0.01] * 19, [0.03] * 19])
    found = goodput_of([samples_of(mixed, WORKLOAD, FIRST, None)], ttft_ms=100, tpot_ms=10)
    assert (found.share, found.requests_per_s, found.output_tokens_per_s) == pytest.approx((1 / 3, 1 / 1.5, 20 / 1.5))


def test_rounds_are_numbered_over_all_starts_and_each_has_prompts_of_its_own() -> None:
    workload = WORKLOAD.model_copy(update={"rounds": 2, "restarts": 2, "seed": 10, "sweep": (1, 32)})
    calls = [*planned_rounds(workload, 0), *planned_rounds(workload, 1)]
    assert [(each.restart, each.number, each.seed, each.start) for each in calls] == [
        (0, 0, 10, 0),
        (0, 1, 11, 3),
        (1, 2, 12, 6),
        (1, 3, 13, 9),
    ]
    assert [(each.concurrency, each.requests, each.seed) for each in planned_sweep(workload)] == [
        (1, 24, 14),
        (32, 128, 15),
    ]


def test_with_a_request_rate_the_observed_concurrency_counts() -> None:
    at_a_rate = WORKLOAD.model_copy(update={"request_rate_per_s": 4.0, "sweep": (3,)})
    assert samples_of(generated(), at_a_rate, FIRST, None).run.concurrency == 7
    sweep = planned_sweep(at_a_rate.model_copy(update={"requests": 3}))[0]
    told = {name: (value * 8 if isinstance(value, list) else value) for name, value in generated(completed=24).items()}
    assert samples_of(told, at_a_rate, sweep, None).run.concurrency == 3
