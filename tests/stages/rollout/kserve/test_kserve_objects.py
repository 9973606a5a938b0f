"""The manifests that a cluster gets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scoring.profile import Profile
from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import AskedServing, Serving
from stages.parts.base.store import ModelStore
from stages.parts.machine.hardware import LIMIT
from stages.parts.releases.release import METRICS
from stages.parts.vllm.arguments import GPU_ARGUMENT, engine_arguments
from stages.rollout.kserve import knative
from stages.rollout.kserve.autoscaling import autoscaler
from stages.rollout.kserve.llm import llm_service
from stages.rollout.kserve.modes import mode_named
from stages.rollout.kserve.objects import (
    ISVCS,
    USER,
    KServeEndpoint,
    disruption_budget,
    predictor_name,
)
from stages.rollout.kserve.route import service_name
from stages.rollout.kserve.scaler import RUNTIME
from stages.rollout.kserve.settings import VERSION, KServe
from stages.rollout.kserve.standard import canary, predictor
from stages.select.selection import select
from tests.adapters import untrained, write
from tests.samples import engine, measured_store
from tests.serving import REPOSITORY

FIRST, SECOND = "0001-fp16-aaaaaaaaaaaa", "0002-awq-bbbbbbbbbbbb"
MODES = ("standard", "knative", "route")


def service(at: KServeEndpoint, release: str, mode: str) -> dict[str, Any]:
    """The InferenceService of a first release."""
    return mode_named(mode).render(at, {release: 100})[0]


def endpoint(
    tmp_path: Path, model: str = "org/name", serving: Serving | None = None, **settings: Any
) -> KServeEndpoint:
    return KServeEndpoint(
        ModelStore(tmp_path, model), serving or Serving(), KServe.model_validate(settings), namespace="slipway"
    )


def runtime() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((REPOSITORY / "manifests/kserve/serving-runtime.yaml").read_text())
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_release_is_served_from_its_own_directory_with_what_was_measured(tmp_path: Path, mode: Any) -> None:
    serving = Serving(max_model_len=4096, tensor_parallel_size=2, extra_arguments=("--enable-prefix-caching",))
    model = service(endpoint(tmp_path, serving=serving, drain_s=60), SECOND, mode)["spec"]["predictor"]["model"]
    assert model["storageUri"] == f"pvc://slipway-models/org--name/releases/{SECOND}"
    assert model["runtime"] == RUNTIME == runtime()["metadata"]["name"]
    measured = engine_arguments(serving, tmp_path, on_gpu=True)
    assert model["args"][-len(measured) :] == measured
    assert model["args"][:2] == ["--served-model-name", "org/name"]
    assert "--enable-force-include-usage" in model["args"], "a gateway would not know the tokens of a stream"
    assert model["args"][model["args"].index("--scheduling-policy") + 1] == "priority", "priorities would be ignored"
    assert model["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "--tensor-parallel-size" in model["args"]
    assert model["env"] == [
        {
            "name": "VLLM_API_KEY",
            "valueFrom": {"secretKeyRef": {"name": "slipway-api", "key": "key", "optional": True}},
        },
        {"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": "3700"},
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("settings", "one"),
    [
        ({"gpu": None, "cpu": "500m"}, True),
        ({"gpu": None, "cpu": "1"}, True),
        ({"gpu": None, "cpu": "1500m"}, False),
        ({"cpu": "1"}, False),
    ],
)
def test_a_pod_that_asks_for_a_core_has_one_thread(
    tmp_path: Path, mode: Any, settings: dict[str, Any], one: bool
) -> None:
    served = service(endpoint(tmp_path, **settings), SECOND, mode)["spec"]["predictor"]["model"]
    variables = {each["name"]: each.get("value") for each in served["env"]}
    assert ("--distributed-executor-backend" in served["args"]) == one
    assert (variables.get("OMP_NUM_THREADS") == "1") == one
    assert (variables.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0") == one


@pytest.mark.parametrize("mode", MODES)
def test_every_pod_has_the_door(tmp_path: Path, mode: Any) -> None:
    pods = service(endpoint(tmp_path), SECOND, mode)["spec"]["predictor"]
    arguments, (mounted,) = pods["model"]["args"], pods["model"]["volumeMounts"]
    module, _, name = arguments[arguments.index("--middleware") + 1].partition(".")
    (volume,) = [each for each in pods["volumes"] if each["name"] == mounted["name"]]
    door = yaml.safe_load((REPOSITORY / "manifests/kserve/door.yaml").read_text())
    assert volume["configMap"]["name"] == door["metadata"]["name"]
    assert f"class {name}:" in door["data"][f"{module}.py"]
    assert pods["model"]["workingDir"] == mounted["mountPath"]
    assert runtime()["spec"]["containers"][0]["command"][:2] == ["python3", "-m"], "which looks in it for modules"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("slo", "within"),
    [
        ({"ttft_ms": 1000, "tpot_ms": 100}, ("1.0", "0.1")),
        ({"ttft_ms": 3000, "tpot_ms": 50.5}, ("5.0", "0.075")),
        ({"ttft_ms": 90_000, "tpot_ms": 90_000}, ("+Inf", "+Inf")),
        (None, (None, None)),
    ],
)
def test_pods_tell_the_targets_of_the_release_s_own_workload(
    tmp_path: Path, mode: Any, slo: Any, within: tuple[str | None, str | None]
) -> None:
    at = endpoint(tmp_path)
    before = service(at, SECOND, mode)["spec"]["predictor"]["labels"]["slipway/revision"]
    (at.store.releases / SECOND).mkdir(parents=True)
    (at.store.releases / SECOND / METRICS).write_text(json.dumps({"workload": {"slo": slo}}))
    pods = service(at, SECOND, mode)["spec"]["predictor"]
    marks = pods.get("annotations", {})
    assert (marks.get("slipway/ttft-within-s"), marks.get("slipway/tpot-within-s")) == within
    assert (pods["labels"]["slipway/revision"] == before) == (slo is None), "another template restarts pods"


@pytest.mark.parametrize("mode", MODES)
def test_a_release_s_adapters_are_served_from_where_kserve_mounts_it(tmp_path: Path, mode: Any) -> None:
    at = endpoint(tmp_path)
    write(at.store.releases / SECOND / "adapters" / "sql", untrained(), r=20)
    arguments = service(at, SECOND, mode)["spec"]["predictor"]["model"]["args"]
    begin = arguments.index("--enable-lora")
    module = '{"name": "sql", "path": "/mnt/models/adapters/sql"}'
    layers = ["--lora-target-modules", "q_proj"]
    expected = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "32", *layers, "--lora-modules", module]
    assert arguments[begin : begin + len(expected)] == expected
    assert runtime()["spec"]["containers"][0]["command"][-1] == "/mnt/models"
    assert "--enable-lora" not in service(at, FIRST, mode)["spec"]["predictor"]["model"]["args"]


def test_a_pod_is_told_how_many_tokens_may_wait(tmp_path: Path) -> None:
    at = KServeEndpoint(ModelStore(tmp_path, "org/name"), AskedServing(max_model_len=512), KServe(), "slipway")
    told = {"prompt_tokens_per_s": 1000, "workload": {"slo": {"ttft_ms": 2000, "tpot_ms": 100}}}
    path = at.store.releases / SECOND / METRICS
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(told))
    arguments = predictor(at, SECOND)["model"]["args"]
    assert arguments[arguments.index("--max-num-queued-tokens") + 1] == "2000"


@pytest.mark.parametrize("measured", ["bfloat16", "float32"])
def test_without_a_gpu_a_release_is_served_as_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: str
) -> None:
    """Whatever the processor of the pod that renders it."""
    store = measured_store(tmp_path)
    for path in (store.evaluation(name) for name in ("fp16", "awq", "gptq")):
        told = json.loads(path.read_text())
        told["engine"]["dtype"] = measured
        path.write_text(json.dumps(told))
    _, decision, _ = select(store, Profile(name="balanced"), ["fp16", "awq", "gptq"])
    at = KServeEndpoint(store, Serving(), KServe(gpu=None), "slipway")
    for limit in ("AVX2", "AVX512_CORE_BF16"):
        monkeypatch.setenv(LIMIT, limit)
        model = predictor(at, decision.release)["model"]
        assert not any("gpu" in each for each in model["resources"]["limits"])
        assert model["args"][model["args"].index("--dtype") + 1] == measured
    chosen = dataclasses.replace(at, serving=Serving(dtype="float16"))
    model = predictor(chosen, decision.release)["model"]
    assert model["args"][model["args"].index("--dtype") + 1] == "float16"


@pytest.mark.parametrize(("arguments", "dtype"), [((GPU_ARGUMENT, "0.9"), "float16"), ((), "bfloat16")])
def test_on_a_gpu_a_release_is_served_as_it_was_measured_on_one(
    tmp_path: Path, arguments: tuple[str, ...], dtype: str
) -> None:
    """A measurement without a GPU says nothing; then the type that the release is stored in decides."""
    store = measured_store(tmp_path)
    for path in (store.evaluation(name) for name in ("fp16", "awq", "gptq")):
        told = json.loads(path.read_text())
        told["engine"] |= {"dtype": "float16", "arguments": arguments}
        path.write_text(json.dumps(told))
    _, decision, _ = select(store, Profile(name="balanced"), ["fp16", "awq", "gptq"])
    at = KServeEndpoint(store, Serving(), KServe(), "slipway")
    model = predictor(at, decision.release)["model"]
    assert model["args"][model["args"].index("--dtype") + 1] == dtype


def test_a_release_is_served_with_what_it_was_measured_with_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    store = measured_store(tmp_path)
    for name in ("fp16", "awq", "gptq"):
        path = store.evaluation(name)
        told = json.loads(path.read_text())
        told["engine"] |= {"arguments": ["--max-model-len", "4096", "--tensor-parallel-size", "2"], "ready_s": 400.0}
        path.write_text(json.dumps(told))
    _, decision, _ = select(store, Profile(name="balanced"), ["fp16", "awq", "gptq"])
    at = KServeEndpoint(store, AskedServing(), KServe(), "slipway")
    model = predictor(at, decision.release)["model"]
    assert " --max-model-len 4096 " in f" {' '.join(model['args'])} "
    assert model["resources"]["limits"] == {"nvidia.com/gpu": "2", "memory": "19Gi"}
    assert at.serving_of(decision.release).startup_timeout_s == 3 * 400
    other = dataclasses.replace(at, serving=AskedServing(tensor_parallel_size=4), settings=KServe(memory="64Gi"))
    limits = predictor(other, decision.release)["model"]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "4", "memory": "64Gi"}


def test_a_release_is_served_by_the_recipe_that_it_was_measured_with(tmp_path: Path) -> None:
    recipe = {"tensor_parallel_size": 1, "speculation": {"method": "ngram"}, "kv_cache_dtype": "fp8"}
    measured = engine(None).model_dump(mode="json") | {"arguments": ["--max-model-len", "4096"], "ready_s": 400.0}
    for settings in (AskedServing(), AskedServing(tensor_parallel_size=4)):
        at = dataclasses.replace(endpoint(tmp_path), serving=settings)
        (at.store.releases / FIRST).mkdir(parents=True, exist_ok=True)
        (at.store.releases / FIRST / METRICS).write_text(json.dumps({"engine": measured, "recipe": recipe}))
        model = predictor(at, FIRST)["model"]
        assert model["resources"]["limits"]["nvidia.com/gpu"] == "1"
        (server,) = llm_service(at, FIRST, "edge/public", "host.example.com", scheduler=False)["spec"]["template"][
            "containers"
        ]
        for arguments in (" ".join(model["args"]), " ".join(server["args"])):
            assert "--tensor-parallel-size" not in arguments
            assert (
                '--kv-cache-dtype fp8 --speculative-config {"method":"ngram","num_speculative_tokens":4}' in arguments
            )


def test_a_release_is_served_by_the_image_of_the_vllm_that_it_was_measured_on(tmp_path: Path) -> None:
    at = KServeEndpoint(ModelStore(tmp_path, "org/name"), AskedServing(), KServe(), "slipway")
    run = engine(None).model_dump(mode="json")
    for release, stack, version in ((FIRST, {"vLLM": "0.31.0"}, "0.31.0"), (SECOND, {}, VERSION)):
        (at.store.releases / release).mkdir(parents=True)
        (at.store.releases / release / METRICS).write_text(json.dumps({"engine": run | {"stack": stack}}))
        model = predictor(at, release)["model"]
        assert (model["image"], model["runtimeVersion"]) == (f"docker.io/vllm/vllm-openai:v{version}", f"v{version}")


def test_the_version_of_vllm_is_that_of_the_evaluation() -> None:
    images = (REPOSITORY / "manifests/images/evaluate/Containerfile").read_text()
    image = KServe().image.replace("{version}", VERSION)
    assert f"ARG VLLM_IMAGE={image}" in images
    assert runtime()["spec"]["containers"][0]["image"] == image


def test_a_pod_that_stops_finishes_its_requests(tmp_path: Path) -> None:
    pods = predictor(endpoint(tmp_path, drain_s=100), FIRST)
    shutdown_s = int(pods["model"]["args"][pods["model"]["args"].index("--shutdown-timeout") + 1])
    pause_s = int(pods["model"]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert shutdown_s == 100
    assert shutdown_s + pause_s < pods["terminationGracePeriodSeconds"]


def test_a_large_model_gets_time_to_load(tmp_path: Path) -> None:
    at = dataclasses.replace(endpoint(tmp_path), serving=AskedServing())
    folder = at.store.releases / SECOND
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(400 << 30)  # a sparse file
    probe = predictor(at, SECOND)["model"]["startupProbe"]
    assert at.serving_of(FIRST).startup_timeout_s == 900
    assert at.serving_of(SECOND).startup_timeout_s == 300 + 4096
    assert (
        dataclasses.replace(at, serving=AskedServing(startup_timeout_s=60)).serving_of(SECOND).startup_timeout_s == 60
    )
    assert probe["periodSeconds"] * probe["failureThreshold"] >= at.serving_of(SECOND).startup_timeout_s
    annotations = knative.predictor(at, SECOND)["annotations"]
    assert (
        int(annotations["serving.knative.dev/progress-deadline"].removesuffix("s"))
        > at.serving_of(SECOND).startup_timeout_s
    )


@pytest.mark.parametrize(
    ("gpu", "size", "expected"), [("nvidia.com/gpu", 1, 4), ("nvidia.com/gpu", 8, 18), (None, 1, 2)]
)
def test_shared_memory_grows_with_the_gpus_and_is_part_of_the_memory(
    tmp_path: Path, gpu: str | None, size: int, expected: int
) -> None:
    at = dataclasses.replace(endpoint(tmp_path, gpu=gpu), serving=Serving(tensor_parallel_size=size))
    for mode in MODES:
        pods = service(at, FIRST, mode)["spec"]["predictor"]
        shared, _ = pods["volumes"]
        assert shared == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{expected}Gi"}}
        assert int(pods["model"]["resources"]["limits"]["memory"].removesuffix("Gi")) > expected
    assert canary(predictor(at, FIRST), 10)["predictor"]["volumes"][0] == shared
    (mounted,) = [each for each in runtime()["spec"]["containers"][0]["volumeMounts"] if each["name"] == "shm"]
    assert mounted["mountPath"] == "/dev/shm"
    assert "shm" in {each["name"] for each in runtime()["spec"]["volumes"]}


def test_probes_need_no_api_key(tmp_path: Path) -> None:
    model = predictor(endpoint(tmp_path), FIRST)["model"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert model[name]["httpGet"] == {"path": "/health", "port": 8080}


def test_knative_gets_no_field_that_it_refuses(tmp_path: Path) -> None:
    pods = knative.predictor(endpoint(tmp_path, timeout_s=3600), FIRST)
    assert not {"terminationGracePeriodSeconds", "topologySpreadConstraints", "name", "nodeSelector"} & pods.keys()
    assert "lifecycle" not in pods["model"]
    assert pods["timeout"] == 600
    assert (pods["scaleMetric"], pods["scaleTarget"], pods["minReplicas"], pods["maxReplicas"]) == (
        "concurrency",
        10,
        1,
        3,
    )
    whole = knative.inference_service(endpoint(tmp_path), pods)
    assert whole["metadata"]["annotations"]["serving.kserve.io/enable-tag-routing"] == "true"
    assert pods["annotations"]["autoscaling.knative.dev/scale-down-delay"] == "300s"


def test_a_canary_has_no_field_that_kserve_refuses_on_one(tmp_path: Path) -> None:
    stable = predictor(endpoint(tmp_path), SECOND)
    entry = canary(stable, 10)
    assert entry["trafficPercent"] == 10
    assert entry["predictor"]["name"] == predictor_name(SECOND) == "r2-bbbbbb"
    assert entry["predictor"]["model"]["name"] == ""
    assert entry["predictor"]["minReplicas"] <= stable["minReplicas"]
    refused = {"maxReplicas", "scaleTarget", "scaleMetric", "autoScaling", "workerSpec"}
    assert not refused & entry["predictor"].keys()


def test_promoting_changes_no_field_of_a_pod(tmp_path: Path) -> None:
    stable = predictor(endpoint(tmp_path), SECOND)
    beside = {"minReplicas", "maxReplicas", "timeout"}
    assert {**canary(stable, 0)["predictor"]}.items() >= {k: v for k, v in stable.items() if k not in beside}.items()


def test_annotations_of_the_service_are_the_same_for_every_release(tmp_path: Path) -> None:
    at = endpoint(tmp_path)
    for mode in MODES:
        made = [service(at, each, mode) for each in (FIRST, SECOND)]
        assert made[0]["metadata"]["annotations"] == made[1]["metadata"]["annotations"]
        assert "serving.kserve.io/enable-prometheus-scraping" not in made[0]["metadata"]["annotations"]
        assert (made[0]["apiVersion"], made[0]["kind"]) == (ISVCS.api_version, "InferenceService")


@pytest.mark.parametrize(
    "model", ["org/name", "Qwen/Qwen2.5-0.5B-Instruct", "0x/" + "y" * 90, "local/_My.Model", "a" * 96]
)
def test_names_fit_into_labels_and_hosts(tmp_path: Path, model: str) -> None:
    at = endpoint(tmp_path, model)
    deployment = f"{at.name}-{predictor_name('123456-awq-bbbbbbbbbbbb')}-predictor"
    assert len(f"isvc.{deployment}") <= 63
    assert at.name[0].isalpha()
    assert at.name == at.name.lower()
    assert set(at.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize("model", ["org/name", "0x/" + "y" * 90])
@pytest.mark.parametrize("namespace", ["ml", "slipway-test-539175", "n" * 24])
def test_the_hosts_of_mode_route_fit_into_a_label_of_dns(tmp_path: Path, model: str, namespace: str) -> None:
    at = dataclasses.replace(endpoint(tmp_path, model), namespace=namespace)
    names = [service_name(at, f"{number:04}-awq-bbbbbbbbbbbb") for number in (1, 9999)]
    assert all(len(f"{name}-predictor-{namespace}") <= 63 for name in names)
    assert all(name[0].isalpha() and at.name[-6:] in name for name in names)
    assert "--" not in names[0]


@pytest.mark.parametrize("model", ["org/name", "0x/" + "y" * 90])
@pytest.mark.parametrize("namespace", ["ml", "slipway-test-539175", "n" * 31])
def test_the_hosts_of_mode_standard_fit_into_a_label_of_dns(tmp_path: Path, model: str, namespace: str) -> None:
    at = dataclasses.replace(endpoint(tmp_path, model), namespace=namespace)
    assert len(f"{at.name}-{predictor_name('9999-awq-bbbbbbbbbbbb')}-predictor-{namespace}") <= 63
    assert at.name[0].isalpha()
    assert at.name[-7:] == endpoint(tmp_path, model).name[-7:]
    assert "--" not in at.name


def test_a_namespace_without_room_for_a_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for the host names"):
        service_name(dataclasses.replace(endpoint(tmp_path, "org/name"), namespace="n" * 60), FIRST)


def test_models_that_look_alike_in_dns_have_names_of_their_own(tmp_path: Path) -> None:
    names = {endpoint(tmp_path, each).name for each in ("org/a-b", "org/a.b", "Org/A-b", "org-a/b")}
    assert len(names) == 4


def test_only_changes_restart_pods(tmp_path: Path) -> None:
    def revision(**changed: Any) -> str:
        return str(predictor(endpoint(tmp_path, **changed), FIRST)["labels"]["slipway/revision"])

    assert revision() == revision(scaling={"maximum": 9}, in_force_s=5, prometheus="http://p:9090")
    assert revision() != revision(drain_s=1)
    assert revision() != revision(serving=Serving(max_model_len=128))


def test_an_argument_that_kserve_treats_as_a_template_is_refused(tmp_path: Path) -> None:
    serving = Serving(extra_arguments=("--chat-template", "{{ messages }}"))
    with pytest.raises(ConfigError, match=r"KServe would treat .*messages.* as a template"):
        predictor(endpoint(tmp_path, serving=serving), FIRST)


def test_replicas_follow_vllms_own_queue(tmp_path: Path) -> None:
    at = endpoint(tmp_path, prometheus="http://p:9090", scaling={"minimum": 2, "maximum": 6, "target": 7})
    spec = autoscaler(at, SECOND, "d")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 6)
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["threshold"] == "7"
    where = f'{{namespace="slipway",slipway_endpoint="{at.name}",slipway_release="{SECOND}"}}'
    now = f"sum(vllm:num_requests_running{where}) + sum(vllm:num_requests_waiting{where})"
    lately = f"sum(rate(vllm:e2e_request_latency_seconds_sum{where}[1m]))"
    assert trigger["metadata"]["query"] == f"({now} > {lately}) or {lately} or ({now})"
    behaviour = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behaviour["scaleDown"]["stabilizationWindowSeconds"] == 300
    assert spec["fallback"]["replicas"] == 2


def test_the_runtime_is_hardened_and_reads_the_store_as_its_owner() -> None:
    spec = runtime()["spec"]
    (container,) = spec["containers"]
    security = container["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["runAsNonRoot"]) == (USER, USER, True)
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    writable = {each["mountPath"] for each in container["volumeMounts"]}
    assert writable == {"/tmp", "/dev/shm"}
    places = {each["name"]: each["value"] for each in container["env"]}
    assert all(places[name].startswith("/tmp") for name in ("HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"))


def test_no_manifest_contains_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_API_KEY", "sesame-4711")
    at = endpoint(tmp_path, prometheus="http://p:9090")
    for mode in MODES:
        assert "sesame-4711" not in repr(service(at, FIRST, mode))


def test_nodes_are_drained_one_replica_at_a_time(tmp_path: Path) -> None:
    at = endpoint(tmp_path)
    spec = disruption_budget(at)["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["selector"]["matchLabels"].items() <= predictor(at, FIRST)["labels"].items()
