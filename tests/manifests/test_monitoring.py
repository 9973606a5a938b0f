"""Alerts that fire when they should, and names of metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.utils import floatToGoString

from pipeline.cluster.manifests import MANIFESTS
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.vllm.prometheus import METRICS
from stages.rollout.kserve import llm, route, standard
from stages.rollout.kserve.autoscaling import METRICS as SCALED_BY
from stages.rollout.kserve.autoscaling import SPENT
from stages.rollout.kserve.objects import (
    BUCKETS_S,
    ENDPOINT,
    LATENCY_TARGETS,
    RELEASE,
    KServeEndpoint,
    predictor_name,
)
from stages.rollout.kserve.settings import KServe

MONITORING = MANIFESTS / "monitoring"
CLIENTS = MANIFESTS / "envoy-gateway" / "clients"
RULES = (MONITORING / "alerts.yaml", CLIENTS / "budgets.yaml")
"""Each beside its tests."""
NAME = re.compile(r"\b(?:vllm:|DCGM_|http_)\w+")
SUFFIX = re.compile(r"_(bucket|sum|count|total)$")
OTHERS = {"http_requests_total", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE"}
"""Metrics of vLLM's HTTP server (prometheus-fastapi-instrumentator) and the DCGM exporter's default set."""


def spec_of(path: Path) -> dict[str, Any]:
    (spec,) = [each["spec"] for each in yaml.safe_load_all(path.read_text()) if each["kind"] == "PrometheusRule"]
    return dict(spec)


def rules() -> list[dict[str, Any]]:
    return [rule for path in RULES for group in spec_of(path)["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def panels() -> list[dict[str, Any]]:
    return [each for each in json.loads((MONITORING / "dashboard.json").read_text())["panels"] if each["type"] != "row"]


def expressions() -> list[str]:
    return [each["expr"] for each in rules()] + [each["expr"] for panel in panels() for each in panel["targets"]]


def vllms_metrics() -> set[str]:
    """The metrics that the installed vLLM registers, read from its source: importing it takes long."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None or not (Path(found.origin).parent / "v1" / "metrics").is_dir():
        pytest.skip("needs vLLM: pip install 'slipway[evaluate]'")
    texts = [path.read_text() for path in (Path(found.origin).parent / "v1" / "metrics").glob("*.py")]
    return {name for text in texts for name in re.findall(r'"(vllm:\w+)"', text)}


def test_every_metric_is_one_that_vllm_tells() -> None:
    known = vllms_metrics()
    scaled_by = {name for names in SCALED_BY.values() for name in names}
    used = {name for text in expressions() for name in NAME.findall(text)} | {*scaled_by, SPENT, *METRICS}
    assert len(used) > 12
    assert {each for each in used - OTHERS if each not in known and SUFFIX.sub("", each) not in known} == set()


def test_metrics_that_are_gone_are_not_used() -> None:
    for text in [*expressions(), (MONITORING / "tests.yaml").read_text()]:
        assert "gpu_cache_usage_perc" not in text
        assert "vllm:time_per_output_token_seconds" not in text


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_prometheus_finds_the_rules_correct_and_their_tests_hold(tmp_path: Path, path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, of the package prometheus")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec_of(path)))
    shutil.copy(path.with_name("tests.yaml"), tmp_path)
    (tmp_path / "gpus.yaml").write_text(yaml.safe_dump(joined_gpus()))
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml", "gpus.yaml"]):
        said = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stdout + said.stderr


def joined_gpus() -> dict[str, Any]:
    """A test for promtool: a GPU's panel tells the release whose pod has it, and nothing of other pods."""
    (panel,) = [each for each in panels() if each["title"] == "GPU power"]
    expression = panel["targets"][0]["expr"].replace("$namespace", "slipway").replace("$endpoint", "m")
    pods = {"a": ("m", "r1"), "b": ("m", "r2"), "c": ("other", "r1")}
    series = [
        {
            "series": f'up{{namespace="slipway",pod="{pod}",slipway_endpoint="{name}",slipway_release="{release}"}}',
            "values": "1x5",
        }
        for pod, (name, release) in pods.items()
    ]
    series += [
        {"series": f'DCGM_FI_DEV_POWER_USAGE{{namespace="slipway",pod="{pod}",gpu="0"}}', "values": f"{watts}x5"}
        for pod, watts in {"a": 100, "b": 200, "c": 300, "training": 400}.items()
    ]
    samples = [
        {"labels": f'{{slipway_release="{release}",pod="{pod}",gpu="0"}}', "value": watts}
        for pod, release, watts in (("a", "r1", 100), ("b", "r2", 200))
    ]
    tests = [{"expr": expression, "eval_time": "3m", "exp_samples": samples}]
    return {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}]}


def test_the_alert_knows_the_deployments_that_kserve_makes_of_our_objects(tmp_path: Path) -> None:
    (expression,) = [rule["expr"] for rule in rules() if str(rule.get("record")).startswith("slipway_endpoint:")]
    ours, name = re.findall(r'"([^"]*\[0-9a-f\][^"]*)"', expression)
    for model in ("org/Model-7B", "m", "a-model/with.a-name-that-is-long-2-abcdef"):
        endpoint = KServeEndpoint(ModelStore(tmp_path, model), Serving(), KServe(), "slipway")
        release = "0012-awq-0123456789ab"
        for deployment in (
            standard.deployment(endpoint, {"name": predictor_name(release)}),
            route.deployment(endpoint, release),
            llm.llm_deployment(llm.llm_name(endpoint, release)),
            f"{endpoint.name}-predictor-00012-deployment",
        ):
            assert re.fullmatch(ours, deployment)
            found = re.fullmatch(name, deployment)
            assert found
            assert found[1] == endpoint.name
    for other in ("web", "iris-predictor", "iris-predictor-00001-deployment"):
        assert not re.fullmatch(ours, other)


def test_every_alert_is_tried_and_says_what_to_do() -> None:
    tests = [each for path in RULES for each in yaml.safe_load(path.with_name("tests.yaml").read_text())["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fired == silent | {"SlipwayNoReplicaAnswers"} == {each["alert"] for each in alerts()}
    for each in alerts():
        assert each["labels"]["severity"] in ("critical", "warning")
        assert each["annotations"].keys() == {"summary", "runbook"}
        happened = ("argo_workflows_slipway_", "slipway_client:over_budget:")
        assert "for" in each or any(series in each["expr"] for series in happened), "what happened stays so"


def test_the_labels_of_pods_become_those_that_queries_use() -> None:
    monitor = yaml.safe_load((MONITORING / "pods.yaml").read_text())["spec"]
    assert monitor["podTargetLabels"] == [ENDPOINT, RELEASE]
    assert monitor["selector"]["matchExpressions"] == [{"key": ENDPOINT, "operator": "Exists"}]
    labels = {each.replace("/", "_") for each in monitor["podTargetLabels"]}
    for text in expressions():
        if "vllm:" in text:
            assert all(label in text for label in labels), text


def test_the_targets_of_pods_become_the_labels_that_rules_compare_with_vllms_own_buckets() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("needs vLLM: pip install 'slipway[evaluate]'")
    buckets = runpy.run_path(str(Path(found.origin).parent / "v1" / "metrics" / "buckets.py"))
    names = {"ttft": "TIME_TO_FIRST_TOKEN_BUCKETS", "tpot": "INTER_TOKEN_LATENCY_BUCKETS"}
    for name, bounds in BUCKETS_S.items():
        assert bounds == buckets[names[name]][: len(bounds)]
        assert [str(each) for each in bounds] == [floatToGoString(each) for each in bounds], "as vLLM writes le"
    monitor = yaml.safe_load((MONITORING / "pods.yaml").read_text())
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        relabelled = {each["sourceLabels"][0]: each["targetLabel"] for each in endpoint["relabelings"]}
        kept = {"".join(c if c.isalnum() else "_" for c in each) for each in LATENCY_TARGETS.values()}
        assert relabelled == {f"__meta_kubernetes_pod_annotation_{label}": label for label in kept}
        assert all(any(f'{label}!=""' in text for text in expressions()) for label in kept)


def test_every_series_of_ours_is_recorded_or_told() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for text in expressions() for name in re.findall(r"\bslipway_\w+:[\w:]+", text)}
    assert used == recorded
    template = (MANIFESTS / "base" / "workflow.yaml").read_text()
    told = {name for text in expressions() for name in re.findall(r"\bargo_workflows_(\w+)", text)}
    assert told == {"slipway_stages_total", "slipway_approval_seconds"}
    assert all(f"name: {name}\n" in template for name in told)


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
