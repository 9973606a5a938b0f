from __future__ import annotations

from typing import Any

import pytest
import yaml

from stages.parts.base.errors import ConfigError
from stages.parts.base.settings import CONFIGS, Workload, parse

LENGTHS = {"prompt_tokens": 8, "output_tokens": 8}
BASE: dict[str, Any] = {"name": "w", "concurrency": 1, "requests": 1, "quality_tasks": ["t"]}


def workload(**changed: Any) -> Workload:
    return parse(Workload, BASE | changed, "the workload")


def protocol(found: Workload) -> tuple[int, int, bool, float | None]:
    return found.rounds, found.restarts, found.interleave, found.drift_limit


def test_a_protocol_sets_defaults_that_each_field_can_override() -> None:
    assert protocol(workload(**LENGTHS, protocol="quick")) == (3, 1, False, None)
    assert protocol(workload(**LENGTHS)) == (4, 1, True, 0.15)
    assert protocol(workload(**LENGTHS, protocol="thorough")) == (4, 3, True, 0.15)
    own = {"rounds": 2, "interleave": False, "drift_limit": None}
    assert protocol(workload(**LENGTHS, protocol="thorough", **own)) == (2, 3, False, None)
    assert protocol(workload(**LENGTHS, protocol="quick", restarts=2, drift_limit=0.3)) == (3, 2, False, 0.3)


def test_a_written_workload_is_read_back_the_same() -> None:
    found = workload(**LENGTHS, protocol="thorough", rounds=2, slo={"ttft_ms": 10, "tpot_ms": 1}, sweep=[1, 4])
    assert Workload.model_validate(found.model_dump(mode="json")) == found


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"protocol": "hasty"}, "protocol: Input should be 'quick', 'standard' or 'thorough'"),
        ({}, "prompt_tokens and output_tokens are required without a trace"),
        ({"prompt_tokens": 8}, "prompt_tokens and output_tokens are required"),
        (LENGTHS | {"trace": "t.jsonl"}, "a trace has its own lengths: remove prompt_tokens"),
        ({"trace": "t.jsonl", "output_spread": 0.5}, "a trace has its own lengths"),
        (LENGTHS | {"prompt_spread": 1.0}, "prompt_spread: Input should be less than 1"),
        (LENGTHS | {"sweep": [4, 4]}, "sweep names a concurrency twice"),
        (LENGTHS | {"sweep": [0]}, "sweep.0: Input should be greater than 0"),
        (LENGTHS | {"request_rate_per_s": 0}, "request_rate_per_s: Input should be greater than 0"),
        (LENGTHS | {"slo": {"ttft_ms": 100}}, "slo.tpot_ms: Field required"),
        (LENGTHS | {"slo": {"ttft_ms": 100, "tpot_ms": 10, "itl_ms": 1}}, "slo.itl_ms: unknown field"),
        (LENGTHS | {"drift_limit": 15}, "drift_limit: Input should be less than 1"),
    ],
)
def test_contradictory_fields_are_refused_with_a_message(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        workload(**changed)
    assert message in str(error.value)


def test_the_longest_request_follows_from_the_spreads() -> None:
    assert workload(prompt_tokens=100, prompt_spread=0.5, output_tokens=9, output_spread=0.25).longest() == (150, 12)


@pytest.mark.parametrize("path", sorted((CONFIGS / "workloads").glob("*.yaml")), ids=lambda path: str(path.stem))
def test_the_included_workloads_are_valid(path: Any) -> None:
    found = parse(Workload, {"name": path.stem} | yaml.safe_load(path.read_text()), str(path))
    assert found.protocol == "standard"
    assert found.prompt_spread > 0


@pytest.mark.slow
def test_the_tasks_of_the_included_workloads_exist_and_can_be_scored() -> None:
    pytest.importorskip("lm_eval", reason="the evaluate extra is not installed")
    from stages.evaluate.quality import check_tasks

    files = sorted((CONFIGS / "workloads").glob("*.yaml"))
    tasks = {task for path in files for task in yaml.safe_load(path.read_text())["quality_tasks"]}
    assert len(files) >= 4
    assert check_tasks(workload(**LENGTHS, quality_tasks=sorted(tasks))) is True
