from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stages.errors import ConfigError, MeasurementFailed
from stages.evaluate.load import check_lengths, load_of, measured_of
from stages.settings import Serving, Workload

WORKLOAD = Workload(
    name="w", prompt_tokens=100, output_tokens=20, concurrency=2, requests=3, quality_tasks=("arc_easy",)
)


def generated(**changed: Any) -> dict[str, Any]:
    """What ``vllm bench serve`` writes."""
    points = {"mean": 1.0, "p50": 0.9, "p95": 2.0, "p99": 3.0}
    metrics = {f"{point}_{m}_ms": value for m in ("ttft", "tpot", "itl", "e2el") for point, value in points.items()}
    totals = {"completed": 3, "failed": 0, "total_input_tokens": 301, "total_output_tokens": 60, "errors": ["", "", ""]}
    rates = {"duration": 1.5, "request_throughput": 2.0, "output_throughput": 40.0}
    # In seconds: a request takes 0.1 s to its first token, and 19 × 0.01 s more.
    details = {"ttfts": [0.1, 0.1, 0.1], "itls": [[0.01] * 19] * 3, "output_lens": [20, 20, 20]}
    return metrics | totals | rates | details | changed


def test_the_generator_s_figures_are_kept_with_their_units() -> None:
    load = load_of(generated(), WORKLOAD)
    assert (load.requests, load.requests_completed, load.requests_failed) == (3, 3, 0)
    assert (load.prompt_tokens, load.output_tokens, load.output_tokens_per_s) == (301, 60, 40.0)
    assert load.e2el_ms.model_dump() == {"mean": 1.0, "p50": 0.9, "p95": 2.0, "p99": 3.0}


def test_failed_requests_are_no_measurement_and_their_reason_is_told() -> None:
    failed = generated(completed=1, failed=2, errors=["", "Traceback\n  ...\nTimeoutError: too slow", "x"])
    with pytest.raises(MeasurementFailed, match="2 of 3 requests failed: TimeoutError: too slow"):
        load_of(failed, WORKLOAD)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_not_a_number_is_no_measurement(value: float) -> None:
    with pytest.raises(MeasurementFailed, match="p95_e2el_ms is"):
        load_of(generated(p95_e2el_ms=value), WORKLOAD)


def test_a_missing_figure_is_no_measurement() -> None:
    result = generated()
    del result["p95_ttft_ms"]
    with pytest.raises(MeasurementFailed, match="p95_ttft_ms"):
        load_of(result, WORKLOAD)


def test_answers_shorter_than_asked_for_are_no_measurement() -> None:
    with pytest.raises(MeasurementFailed, match="gave 59 tokens, not the 60"):
        load_of(generated(total_output_tokens=59), WORKLOAD)


@pytest.mark.parametrize(("config_tokens", "served_tokens"), [(119, None), (1024, 119)])
def test_a_workload_longer_than_the_model_is_refused(tmp_path: Path, config_tokens: int, served_tokens: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": config_tokens}))
    with pytest.raises(ConfigError, match=r"100 \+ 20 = 120 tokens, but the model is served with 119"):
        check_lengths(tmp_path, WORKLOAD, Serving(max_model_len=served_tokens))


def test_a_workload_that_just_fits_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 120}}))
    check_lengths(tmp_path, WORKLOAD, Serving())
    with pytest.raises(ConfigError):
        check_lengths(tmp_path, WORKLOAD.model_copy(update={"output_tokens": 21}), Serving())


def test_rounds_are_kept_and_put_together() -> None:
    slower = {"ttfts": [0.2, 0.2, 0.2], "output_throughput": 20.0}
    found = measured_of([generated(), generated(**slower)], WORKLOAD)
    assert [each.output_tokens_per_s for each in found.rounds] == [40.0, 20.0]
    assert (found.load.requests, found.load.output_tokens, found.load.duration_s) == (6, 120, 3.0)
    assert found.load.output_tokens_per_s == 30.0
    assert (found.load.ttft_ms.p50, found.load.ttft_ms.p99) == pytest.approx((150, 200))
    assert (found.load.tpot_ms.mean, found.load.itl_ms.mean) == pytest.approx((10, 10))
    assert found.load.e2el_ms.p99 == pytest.approx(390)


def test_every_request_is_told_with_its_round() -> None:
    found = measured_of([generated(), generated()], WORKLOAD)
    assert [each["round"] for each in found.requests] == [0, 0, 0, 1, 1, 1]
    assert found.requests[0] == {"round": 0, "ttft_ms": 100.0, "tpot_ms": 10.0, "e2el_ms": 290.0, "output_tokens": 20}


@pytest.mark.parametrize("missing", [{"ttfts": []}, {"itls": [[0.01] * 19] * 2}, {"output_lens": None}])
def test_requests_that_were_not_told_are_no_measurement(missing: dict[str, Any]) -> None:
    with pytest.raises(MeasurementFailed, match="not usable"):
        measured_of([generated(**missing)], WORKLOAD)
