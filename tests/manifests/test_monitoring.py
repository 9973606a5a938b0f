"""Alerts that fire when they should, and names of metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.manifests import MANIFESTS
from stages.rollout.kserve.autoscaling import LOAD
from stages.rollout.kserve.objects import ENDPOINT, RELEASE
from stages.rollout.vllm_metrics import METRICS

MONITORING = MANIFESTS / "monitoring"
NAME = re.compile(r"\b(?:vllm:|DCGM_|http_)\w+")
SUFFIX = re.compile(r"_(bucket|sum|count|total)$")
OTHERS = {"http_requests_total", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE"}
"""Of vLLM's HTTP server (prometheus-fastapi-instrumentator) and of the DCGM exporter's default set."""


def alerts() -> list[dict[str, Any]]:
    spec = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]
    return [rule for group in spec["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [each for each in json.loads((MONITORING / "dashboard.json").read_text())["panels"] if each["type"] != "row"]


def expressions() -> list[str]:
    return [each["expr"] for each in alerts()] + [each["expr"] for panel in panels() for each in panel["targets"]]


def vllms_metrics() -> set[str]:
    """As the installed vLLM registers them, read from its source: importing it takes long."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None or not (Path(found.origin).parent / "v1" / "metrics").is_dir():
        pytest.skip("needs vLLM: pip install 'slipway[evaluate]'")
    texts = [path.read_text() for path in (Path(found.origin).parent / "v1" / "metrics").glob("*.py")]
    return {name for text in texts for name in re.findall(r'"(vllm:\w+)"', text)}


def test_every_metric_is_one_that_vllm_tells() -> None:
    known = vllms_metrics()
    used = {name for text in expressions() for name in NAME.findall(text)} | {*LOAD, *METRICS}
    assert len(used) > 12
    assert {each for each in used - OTHERS if each not in known and SUFFIX.sub("", each) not in known} == set()


def test_metrics_that_are_gone_are_not_used() -> None:
    for text in [*expressions(), (MONITORING / "tests.yaml").read_text()]:
        assert "gpu_cache_usage_perc" not in text
        assert "vllm:time_per_output_token_seconds" not in text


def test_prometheus_finds_the_rules_correct_and_their_tests_hold(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, of the package prometheus")
    spec = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    shutil.copy(MONITORING / "tests.yaml", tmp_path)
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        said = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stdout + said.stderr


def test_every_alert_is_tried_and_says_what_to_do() -> None:
    tests = yaml.safe_load((MONITORING / "tests.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fired == silent | {"SlipwayNoReplicaAnswers"} == {each["alert"] for each in alerts()}
    for each in alerts():
        assert each["labels"]["severity"] in ("critical", "warning")
        assert each["annotations"].keys() == {"summary", "runbook"}
        assert each["for"]


def test_the_labels_of_pods_become_those_that_queries_use() -> None:
    monitor = yaml.safe_load((MONITORING / "pods.yaml").read_text())["spec"]
    assert monitor["podTargetLabels"] == [ENDPOINT, RELEASE]
    assert monitor["selector"]["matchExpressions"] == [{"key": ENDPOINT, "operator": "Exists"}]
    labels = {each.replace("/", "_") for each in monitor["podTargetLabels"]}
    for text in expressions():
        if "vllm:" in text:
            assert all(label in text for label in labels), text


def test_the_dashboard_shows_what_matters_by_release() -> None:
    shown = " ".join(each["expr"] for panel in panels() for each in panel["targets"])
    for metric in (
        "e2e_request_latency_seconds_bucket",
        "time_to_first_token_seconds_bucket",
        "request_time_per_output_token_seconds_bucket",
        "generation_tokens_total",
        "num_requests_waiting",
        "kv_cache_usage_perc",
    ):
        assert f"vllm:{metric}" in shown
    for quantile in ("0.5,", "0.95,", "0.99,"):
        assert f"histogram_quantile({quantile}" in shown
    numbers = [each["id"] for each in panels()]
    assert len(numbers) == len(set(numbers))


def test_monitoring_is_no_part_of_what_every_cluster_applies() -> None:
    base = yaml.safe_load((MANIFESTS / "base" / "kustomization.yaml").read_text())
    assert not [each for each in base["resources"] if "monitoring" in each or "kserve" in each]
    for folder in (MONITORING, MANIFESTS / "kserve"):
        for each in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
            assert (folder / each).is_file()
