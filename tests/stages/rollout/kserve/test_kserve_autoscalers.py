"""What scales on a cluster, and by what."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.settings.config import kserve_settings, load
from scoring.profile import Profile
from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import Serving
from stages.parts.base.settings import parse
from stages.parts.base.store import ModelStore
from stages.rollout.kserve import knative
from stages.rollout.kserve.autoscaling import autoscaler, check_scaling, lacking
from stages.rollout.kserve.modes import render
from stages.rollout.kserve.objects import KServeEndpoint, predictor
from stages.rollout.kserve.scaler import NOTHING, PROMETHEUS, RUNTIME, Scaler, find_prometheus, find_scaler
from stages.rollout.kserve.scaling_targets import cold_start_of, concurrency_of, target_of
from stages.rollout.kserve.settings import KServe, Scaling
from stages.select.selection import select
from tests.kubernetes.objects import Resource
from tests.samples import measured_store
from tests.serving import wait_until
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT

RELEASE = "0001-fp16-aaaaaaaaaaaa"
URL = "http://prometheus-operated.monitoring.svc:9090"
DAY = {"start": "0 8 * * 1-5", "end": "0 19 * * 1-5", "timezone": "Europe/Berlin", "replicas": 2}
RUNNING, WAITING, CACHE = "vllm:num_requests_running", "vllm_num_requests_waiting", "vllm:kv_cache_usage_perc"
OFFERED = Scaler("", frozenset({RUNNING, WAITING, CACHE}), "no KEDA")


def endpoint(folder: Path, found: Scaler = NOTHING, **settings: Any) -> KServeEndpoint:
    return KServeEndpoint(ModelStore(folder, "org/name"), Serving(), KServe.model_validate(settings), "slipway", found)


def measured(folder: Path, changes: dict[str, Any], **settings: Any) -> tuple[KServeEndpoint, str]:
    """An endpoint with a release that was measured, but for these changes of its decision."""
    store = measured_store(folder)
    _, decision, _ = select(store, Profile(name="balanced"), ["fp16", "awq", "gptq"])
    path = store.releases / decision.release / "production_metrics.json"
    document = json.loads(path.read_text())
    workload = {"slo": {"ttft_ms": 500, "tpot_ms": 50}, "prompt_tokens": 100, "output_tokens": 6, "concurrency": 4}
    document["workload"] |= workload
    for candidate in document["candidates"]:
        candidate["raw"] |= {"throughput": 120.0, "latency": 1000.0}
    for name, value in changes.items():
        document[name] = document[name] | value if isinstance(document.get(name), dict) else value
    path.write_text(json.dumps(document))
    return KServeEndpoint(store, Serving(), KServe.model_validate(settings), "slipway"), decision.release


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 16),  # 120 tokens/s in answers of 6 are 20 requests/s; each takes 1 s; four fifths of them
        ({"workload": {"output_tokens": None, "trace": "own.jsonl"}}, 3),
        ({"workload": {"slo": None, "concurrency": 64}}, 51),
        ({"recipe": {"tensor_parallel_size": 1}}, 3),
        ({"workload": {"output_tokens": 60_000}}, 1),
    ],
    ids=["measured", "a trace", "nobody waits", "several servers", "long answers"],
)
def test_a_replica_should_have_what_its_release_was_measured_to_do_within_the_targets(
    tmp_path: Path, changes: dict[str, Any], expected: int
) -> None:
    at, release = measured(tmp_path, changes)
    assert target_of(at, release) == concurrency_of(at, release) == expected


def test_each_metric_has_its_own_target_from_the_measurement(tmp_path: Path) -> None:
    at, release = measured(tmp_path, {"prompt_tokens_per_s": 1000})
    targets = {}
    for metric in ("queue", "ttft", "kv_cache"):
        scaling = Scaling.model_validate({"metric": metric})
        targets[metric] = target_of(dataclasses.replace(at, settings=KServe(scaling=scaling)), release)
    assert targets == {"queue": 4, "ttft": 500, "kv_cache": 0.8}  # 1000 tokens/s × 0.5 s in prompts of 100
    assert target_of(endpoint(tmp_path, scaling={"metric": "ttft"}), RELEASE) == 2000
    assert target_of(endpoint(tmp_path, scaling={"metric": "queue"}), RELEASE) == 1
    assert target_of(endpoint(tmp_path), RELEASE) == 10


@pytest.mark.parametrize("metric", ["concurrency", "queue", "ttft", "kv_cache"])
def test_a_set_target_counts_for_its_metric(tmp_path: Path, metric: str) -> None:
    at = endpoint(tmp_path, prometheus=URL, scaling={"metric": metric, "target": 2.5})
    (trigger,) = autoscaler(at, RELEASE, "d")["spec"]["triggers"]
    assert trigger["metadata"]["threshold"] == "2.5"
    assert trigger["metadata"]["serverAddress"] == URL


def test_a_time_is_one_value_of_all_replicas_and_the_rest_is_shared_among_them(tmp_path: Path) -> None:
    seen = {}
    for metric in ("concurrency", "queue", "ttft", "kv_cache"):
        at = endpoint(tmp_path, prometheus=URL, scaling={"metric": metric})
        (trigger,) = autoscaler(at, RELEASE, "d")["spec"]["triggers"]
        seen[metric] = trigger["metricType"], trigger["metadata"]["query"]
    assert {metric: kind for metric, (kind, _) in seen.items()} == {
        "concurrency": "AverageValue", "queue": "AverageValue", "kv_cache": "AverageValue", "ttft": "Value"
    }  # fmt: skip
    of = f'{{namespace="slipway",slipway_endpoint="{endpoint(tmp_path).name}",slipway_release="{RELEASE}"}}'
    assert seen["queue"][1] == f"sum(vllm:num_requests_waiting{of})"
    assert seen["kv_cache"][1] == f"sum(vllm:kv_cache_usage_perc{of})"
    assert (
        f"histogram_quantile(0.95, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{of}[2m])))"
        in (seen["ttft"][1])
    )


def test_a_floor_by_the_time_of_the_week_holds_for_the_stable_release_alone(tmp_path: Path) -> None:
    at = endpoint(tmp_path, prometheus=URL, scaling={"schedule": [DAY]})
    (tmp_path / "org--name" / "releases" / RELEASE).mkdir(parents=True)
    _, floor = autoscaler(at, RELEASE, "d")["spec"]["triggers"]
    times = {"start": "0 8 * * 1-5", "end": "0 19 * * 1-5", "timezone": "Europe/Berlin", "desiredReplicas": "2"}
    assert floor == {"type": "cron", "metadata": times}
    assert len(autoscaler(at, RELEASE, "d", canary=True)["spec"]["triggers"]) == 1
    other = "0002-awq-bbbbbbbbbbbb"
    scaled = [body for body in render(at, other, RELEASE, "route", 10) if body["kind"] == "ScaledObject"]
    assert [len(body["spec"]["triggers"]) for body in scaled] == [2, 1]


@pytest.mark.parametrize(
    ("scaling", "why"),
    [
        ({"schedule": [DAY | {"replicas": 4}]}, r"floor of 4 replicas above maximum \(3\)"),
        ({"schedule": [DAY | {"start": "8:00"}]}, r"schedule\.0\.start"),
        ({"concurrency": 10}, "there is no such field any more: scaling.target"),
        ({"metric": "cpu"}, "metric"),
        ({"target": 0}, "target"),
        ({"minimum": -1}, "minimum"),
    ],
)
def test_wrong_settings_are_named(scaling: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(KServe, {"scaling": scaling}, "kserve")


@pytest.mark.parametrize(
    ("scaling", "scaler", "mode", "why"),
    [
        ({"minimum": 0}, Scaler(URL), "route", "answered 503"),
        ({"schedule": [DAY]}, OFFERED, "route", "schedule: no KEDA"),
        ({"schedule": [DAY]}, Scaler(URL), "knative", "schedule: Knative has none"),
        ({"metric": "ttft"}, NOTHING, "knative", "Knative does not scale by ttft"),
        ({"metric": "ttft"}, OFFERED, "llm", "without KEDA nothing scales by ttft; metrics of pods there: vllm:kv_"),
        ({"metric": "queue"}, Scaler("", frozenset({RUNNING}), "no KEDA"), "llm", "by queue"),
    ],
)
def test_what_a_cluster_can_not_do_is_refused_by_name(
    scaling: dict[str, Any], scaler: Scaler, mode: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        check_scaling(scaler, Scaling.model_validate(scaling), mode)


@pytest.mark.parametrize(
    ("scaling", "scaler", "mode"),
    [
        ({"minimum": 0}, NOTHING, "knative"),
        ({"schedule": [DAY], "metric": "ttft"}, Scaler(URL), "standard"),
        ({"metric": "queue"}, OFFERED, "standard"),
        ({}, NOTHING, "standard"),
    ],
)
def test_what_it_can_do_is_not(scaling: dict[str, Any], scaler: Scaler, mode: str) -> None:
    check_scaling(scaler, Scaling.model_validate(scaling), mode)


def test_without_keda_a_pod_autoscaler_scales_by_the_metrics_that_there_are(tmp_path: Path) -> None:
    at = endpoint(tmp_path, OFFERED, scaling={"maximum": 5, "target": 12})
    body = autoscaler(at, RELEASE, "d")
    assert (body["kind"], body["metadata"]["name"]) == ("HorizontalPodAutoscaler", "hpa-d")
    metrics = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in body["spec"]["metrics"]}
    amount = {"type": "AverageValue", "averageValue": "12000m"}
    assert metrics == {RUNNING: amount, WAITING: amount}
    assert (body["spec"]["minReplicas"], body["spec"]["maxReplicas"]) == (1, 5)
    assert body["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    conditions = [{"type": "ScalingActive", "status": "False", "message": "no metrics"}]
    assert lacking(body | {"status": {"conditions": conditions}}) == (
        "HorizontalPodAutoscaler says ScalingActive False: no metrics"
    )


def test_knative_takes_the_measured_target_and_none_while_nobody_asks(tmp_path: Path) -> None:
    at, release = measured(tmp_path, {}, scaling={"minimum": 0})
    made = knative.predictor(at, release)
    assert (made["minReplicas"], made["scaleTarget"]) == (0, 16)
    assert made["annotations"]["autoscaling.knative.dev/initial-scale"] == "1"  # else the rollout would see nothing


def test_replicas_may_run_on_spot_nodes_where_the_others_are_full_and_end_within_their_notice(tmp_path: Path) -> None:
    config = load(chosen={"platform": "eks"}, assignments=["kserve.scaling.spot=true"])
    at = dataclasses.replace(endpoint(tmp_path), settings=kserve_settings(config))
    (tmp_path / "org--name" / "releases" / RELEASE).mkdir(parents=True)
    pods = predictor(at, RELEASE)
    (preferred,) = pods["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (expression,) = preferred["preference"]["matchExpressions"]
    assert expression == {"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]}
    assert "karpenter.sh/capacity-type" not in pods["nodeSelector"]
    assert pods["terminationGracePeriodSeconds"] == 85 <= 120
    assert "affinity" not in predictor(endpoint(tmp_path), RELEASE)
    gke = kserve_settings(load(chosen={"platform": "gke"}, assignments=["kserve.scaling.spot=true"]))
    pods = predictor(dataclasses.replace(at, settings=gke), RELEASE)
    assert pods["model"]["args"][pods["model"]["args"].index("--shutdown-timeout") + 1] == "1"
    assert "cloud.google.com/gke-spot" in {each["key"] for each in pods["tolerations"]}
    with pytest.raises(ConfigError, match="the platform onprem names no spot nodes"):
        load(chosen={"platform": "onprem"}, assignments=["kserve.scaling.spot=true"])


def service(name: str, labels: dict[str, str], *ports: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "monitoring", "labels": labels}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": list(ports)}}


def test_prometheus_is_found_by_its_service(standard: OnKServe) -> None:
    at = standard.cluster()
    assert find_prometheus(at) == []
    standard.server.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "monitoring"}})
    chart = {"app.kubernetes.io/name": "prometheus"}
    standard.server.put(service("prometheus-server", chart, {"name": "http", "port": 80}))
    assert find_prometheus(at) == ["http://prometheus-server.monitoring.svc:80"]
    ports = {"name": "grpc", "port": 10901}, {"name": "http-web", "port": 9090}
    standard.server.put(service("prometheus-operated", {"operated-prometheus": "true"}, *ports))
    assert find_prometheus(at) == [URL]
    standard.server.forbidden.add(("list", "services"))
    assert find_prometheus(at) == []


def told(kserve: OnKServe, url: str) -> None:
    """Leave the ServingRuntime as ``slipway install`` does where there is a Prometheus."""
    runtime = kserve.server.find("ServingRuntime", RUNTIME)
    runtime["metadata"]["annotations"] = {PROMETHEUS: url} if url else {}
    kserve.server.put(runtime)


def offer(kserve: OnKServe, *names: str) -> None:
    """Let an adapter offer metrics of pods."""
    for name in names:
        kserve.server.register(Resource("custom.metrics.k8s.io/v1beta1", "MetricValueList", f"pods/{name}"))


@pytest.mark.parametrize("mode", ["standard", "route", "llm"])
def test_a_release_is_scaled_without_a_setting_where_keda_and_prometheus_are(
    serve: Callable[..., OnKServe], mode: str
) -> None:
    kserve = serve(**MODES[mode])
    told(kserve, URL)
    kserve.first()
    (scaled,) = kserve.server.all("ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["serverAddress"] == URL
    assert kserve.connect().replicas(GOOD).concurrency == 10
    kserve.connect().withdraw(GOOD, first=True)
    assert kserve.server.all("ScaledObject") == []


def test_counters_are_read_from_the_pods_whatever_prometheus_was_found(standard: OnKServe) -> None:
    told(standard, "http://127.0.0.1:9")
    standard.first()
    assert standard.connect().counters(GOOD).answered >= 0  # nothing answers there


@pytest.mark.parametrize("mode", ["standard", "route", "llm"])
def test_keda_takes_the_place_of_the_pod_autoscaler_once_it_is_there(serve: Callable[..., OnKServe], mode: str) -> None:
    kserve = serve(**MODES[mode])
    kserve.server.unregister("keda.sh/v1alpha1", "scaledobjects")
    assert find_scaler(kserve.cluster(), KServe()).name == ""
    offer(kserve, RUNNING, WAITING)
    found = find_scaler(kserve.cluster(), KServe())
    assert found.lacking == "no Prometheus (slipway install looks for it) and no KEDA"
    kserve.first()
    (scaled,) = kserve.server.all("HorizontalPodAutoscaler")
    assert scaled["spec"]["scaleTargetRef"]["name"] == kserve.deployment(GOOD)
    assert kserve.connect().replicas(GOOD).lacking == "HorizontalPodAutoscaler has not said anything about it"
    kserve.server.register(Resource("keda.sh/v1alpha1", "ScaledObject", "scaledobjects", status=True))
    told(kserve, URL)
    kserve.make(NEXT)
    kserve.roll(NEXT)
    assert kserve.server.all("HorizontalPodAutoscaler") == []
    assert len(kserve.server.all("ScaledObject")) == 1


def test_a_floor_is_kept_while_its_time_lasts(standard: OnKServe) -> None:
    told(standard, URL)
    standard.settings = standard.settings.model_copy(update={"scaling": Scaling.model_validate({"schedule": [DAY]})})
    standard.kserve.keda.within_floors = True
    standard.first()
    wait_until(lambda: standard.connect().replicas(GOOD).ready == 2, "the floor holds")
    standard.kserve.keda.within_floors = False
    wait_until(lambda: standard.connect().replicas(GOOD).running == 1, "it is over")


def test_what_a_cold_start_takes_is_said_where_there_may_be_no_replica(
    serve: Callable[..., OnKServe], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    at, release = measured(tmp_path / "measured", {})
    assert cold_start_of(at, release).startswith("about ")
    kserve = serve(**MODES["knative"])
    kserve.settings = kserve.settings.model_copy(update={"scaling": Scaling(minimum=0)})
    kserve.make(GOOD)
    kserve.connect().deploy(GOOD)
    said = capfd.readouterr().err
    assert "no replica while nobody asks; the next request then waits until its model has loaded" in said
    assert kserve.service()["spec"]["predictor"]["minReplicas"] == 0
