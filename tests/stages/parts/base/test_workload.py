from __future__ import annotations

from typing import Any

import pytest
import yaml

from stages.evaluate.quality import OURS
from stages.parts.base.errors import ConfigError
from stages.parts.base.settings import CONFIGS, parse
from stages.parts.base.workload import Slo, Workload

LENGTHS = {"prompt_tokens": 8, "output_tokens": 8}
BASE: dict[str, Any] = {"name": "w", "concurrency": 1, "quality_tasks": ["t"]}


def workload(**changed: Any) -> Workload:
    return parse(Workload, BASE | changed, "the workload")


def test_a_protocol_sets_the_budget_unless_the_workload_does() -> None:
    assert workload(**LENGTHS, protocol="quick").budget_minutes == 20
    assert workload(**LENGTHS).budget_minutes == 120
    assert workload(**LENGTHS, protocol="thorough").budget_minutes == 240
    assert workload(**LENGTHS, protocol="thorough", budget_minutes=2.5).budget_minutes == 2.5


def test_a_written_workload_is_read_back_the_same() -> None:
    found = workload(**LENGTHS, protocol="thorough", budget_minutes=2, slo={"ttft_ms": 10, "tpot_ms": 1})
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
        (LENGTHS | {"steady_s": 0}, "steady_s: Input should be greater than 0"),
        (LENGTHS | {"trials": 2}, "trials: Input should be greater than or equal to 3"),
        (LENGTHS | {"request_rate_per_s": 0}, "request_rate_per_s: Input should be greater than 0"),
        (LENGTHS | {"slo": {"ttft_ms": 100}}, "slo.tpot_ms: Field required"),
        (LENGTHS | {"slo": {"ttft_ms": 100, "tpot_ms": 10, "itl_ms": 1}}, "slo.itl_ms: unknown field"),
        (LENGTHS | {"budget_minutes": 0}, "budget_minutes: Input should be greater than 0"),
        (LENGTHS | {"rounds": 4}, "rounds: there is no such field any more: every start of a server has one round"),
        (LENGTHS | {"restarts": 3}, "restarts: there is no such field any more: servers are started anew until"),
        (LENGTHS | {"interleave": True}, "interleave: there is no such field any more: the variants are measured in"),
        (LENGTHS | {"drift_limit": 0.1}, "drift_limit: there is no such field any more: drift affects all variants"),
    ],
)
def test_contradictory_fields_are_refused_with_a_message(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        workload(**changed)
    assert message in str(error.value)


def test_the_longest_request_follows_from_the_spreads() -> None:
    assert workload(prompt_tokens=100, prompt_spread=0.5, output_tokens=9, output_spread=0.25).longest() == (150, 12)


def test_only_where_nobody_waits_there_are_no_targets() -> None:
    assert workload(**LENGTHS).slo == Slo(ttft_ms=2000, tpot_ms=200)
    assert workload(**LENGTHS, slo=None).slo is None
    included = {path.stem: yaml.safe_load(path.read_text()) for path in (CONFIGS / "workloads").glob("*.yaml")}
    assert [name for name, each in included.items() if not each["slo"]] == ["batch"]


@pytest.mark.parametrize("path", sorted((CONFIGS / "workloads").glob("*.yaml")), ids=lambda path: str(path.stem))
def test_the_included_workloads_are_valid(path: Any) -> None:
    found = parse(Workload, {"name": path.stem} | yaml.safe_load(path.read_text()), str(path))
    assert found.protocol == "standard"
    assert found.prompt_spread > 0


def test_the_tasks_of_the_included_workloads_are_among_our_own() -> None:
    files = sorted((CONFIGS / "workloads").glob("*.yaml"))
    tasks = {task for path in files for task in yaml.safe_load(path.read_text())["quality_tasks"]}
    assert len(files) >= 4
    assert tasks <= OURS
