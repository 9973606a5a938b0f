"""Which way of splitting traffic is used on a cluster, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stages.parts.base.errors import ConfigError, NotInstalled
from stages.rollout.kserve.detect import detect
from stages.rollout.kserve.settings import VARIABLE, KServe
from tests.kubernetes.objects import Resource
from tests.serving import environment, stage
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES

Serve = Callable[..., OnKServe]
LLM_CHARTS = "install KServe's charts kserve-llmisvc-crd and kserve-llmisvc-resources, 0.20 or newer"
CONFIG_CHART = "install KServe's chart kserve-runtime-configs, or apply its config/llmisvcconfig"


def mode(kserve: OnKServe, chosen: str = "auto") -> str:
    return detect(kserve.cluster(), KServe.model_validate({"mode": chosen})).mode


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({"mode": "Standard", "version": "v0.21.0"}, "standard"),
        ({"mode": "Standard", "version": "v1.0.0"}, "standard"),
        ({"mode": "RawDeployment", "version": "v0.15.2"}, "route"),
        ({"mode": "Standard", "version": "v0.20.1"}, "route"),
        ({"mode": "Serverless", "version": "v0.15.2"}, "knative"),
        ({"mode": "Knative", "version": "v0.21.0", "gateway_api": False}, "knative"),
    ],
)
def test_the_mode_follows_from_the_cluster(serve: Serve, cluster: dict[str, Any], expected: str) -> None:
    assert mode(serve(**cluster)) == expected


def test_standard_mode_without_the_gateway_api_is_refused_by_name(serve: Serve) -> None:
    kserve = serve(gateway_api=False)
    for chosen in ("auto", "standard"):
        with pytest.raises(
            ConfigError, match=r"Standard mode without the Gateway API \(ingress.enableGatewayApi"
        ) as no:
            mode(kserve, chosen)
        assert "set it to true" in no.value.hint
        assert "kserve.mode to route" in no.value.hint
    assert mode(kserve, "route") == "route"


def test_a_namespace_too_long_for_the_hosts_of_mode_standard_is_refused_before_anything_is_made(serve: Serve) -> None:
    long = serve(**MODES["standard"]).cluster()
    long.namespace = "n" * 32
    with pytest.raises(ConfigError, match="with more than 63 characters in a row") as no:
        detect(long, KServe())
    assert "a namespace with a shorter name" in no.value.hint


def test_a_mode_that_the_version_lacks_is_refused_by_name(serve: Serve) -> None:
    with pytest.raises(ConfigError, match=r"KServe 0\.20 does not split traffic in Standard mode"):
        mode(serve(version="v0.20.0"), "standard")


@pytest.mark.parametrize(
    ("missing", "chosen", "named"),
    [
        (("serving.kserve.io/v1beta1", "inferenceservices"), "auto", "InferenceService"),
        (("serving.knative.dev/v1", "revisions"), "knative", "Revision"),
        (("gateway.networking.k8s.io/v1", "httproutes"), "route", "HTTPRoute"),
    ],
)
def test_what_a_mode_needs_is_named_if_it_is_not_installed(
    serve: Serve, missing: tuple[str, str], chosen: str, named: str
) -> None:
    kserve = serve()
    kserve.kserve.stop()
    kserve.server.unregister(*missing)
    with pytest.raises(NotInstalled, match=f"has no kind {named}"):
        mode(kserve, chosen)


def test_a_configuration_that_may_not_be_read_can_be_replaced_by_the_modes_name(serve: Serve) -> None:
    kserve = serve()
    kserve.server.forbidden |= {("get", "configmaps"), ("get", "deployments"), ("get", "customresourcedefinitions")}
    with pytest.raises(NotInstalled, match="can't be read") as raised:
        mode(kserve)
    assert "set kserve.mode" in raised.value.hint
    assert [mode(kserve, chosen) for chosen in ("standard", "knative", "route")] == ["standard", "knative", "route"]


def test_mode_llm_is_asked_for_and_never_chosen(serve: Serve) -> None:
    kserve = serve(**MODES["llm"])
    assert (mode(kserve), mode(kserve, "llm")) == ("route", "llm")


@pytest.mark.parametrize(
    ("lacks", "settings", "named", "hint"),
    [
        ("LLMInferenceService", {}, "has no kind LLMInferenceService", LLM_CHARTS),
        (
            "InferencePool",
            {"scheduler": True},
            "has no kind InferencePool",
            "install the Gateway API Inference Extension's CRDs, and a gateway that knows them",
        ),
        (
            "LocalModelNamespaceCache",
            {"source": "s3://a/b", "cache_nodes": "gpus"},
            "has no kind LocalModelNamespaceCache",
            "install KServe 0.21 or newer",
        ),
        ("HTTPRoute", {}, "has no kind HTTPRoute", "install the Gateway API's CRDs"),
        ("controller", {}, "no llmisvc-controller-manager in namespace kserve", LLM_CHARTS),
        (
            "kserve-config-llm-template",
            {},
            "no LLMInferenceServiceConfig kserve-config-llm-template in namespace kserve",
            CONFIG_CHART,
        ),
        (
            "kserve-config-llm-scheduler",
            {"scheduler": True},
            "no LLMInferenceServiceConfig kserve-config-llm-scheduler in namespace kserve",
            CONFIG_CHART,
        ),
    ],
)
def test_what_mode_llm_lacks_is_named(
    serve: Serve, lacks: str, settings: dict[str, Any], named: str, hint: str
) -> None:
    kserve = serve(**MODES["llm"])
    kserve.kserve.stop()
    server = kserve.server
    if lacks != "InferencePool":
        server.register(Resource("inference.networking.k8s.io/v1", "InferencePool", "inferencepools"))
    if lacks == "controller":
        server.remove("Deployment", "llmisvc-controller-manager", "kserve")
    elif lacks.startswith("kserve-"):
        server.remove("LLMInferenceServiceConfig", lacks, "kserve")
    elif lacks != "InferencePool":
        gone = server.resource(lacks)
        server.unregister(gone.api_version, gone.plural)
    with pytest.raises(NotInstalled, match=named) as missing:
        detect(kserve.cluster(), KServe.model_validate({"mode": "llm", "llm": settings}))
    assert missing.value.hint == hint


def test_mode_llm_is_refused_where_kserve_is_set_up_otherwise(serve: Serve) -> None:
    kserve = serve(**MODES["llm"])
    copied = KServe.model_validate({"mode": "llm", "llm": {"source": "s3://a/b", "cache_nodes": "gpus"}})
    configured = kserve.server.find("ConfigMap", "inferenceservice-config", "kserve")
    configured["data"] |= {"localModel": '{"enabled": false}'}
    kserve.server.put(configured)
    with pytest.raises(ConfigError, match="KServe keeps no models on nodes"):
        detect(kserve.cluster(), copied)
    configured["data"] |= {"ingress": '{"enableLLMInferenceServiceTLS": true}'}
    kserve.server.put(configured)
    with pytest.raises(ConfigError, match="KServe expects TLS of LLMInferenceServices"):
        mode(kserve, "llm")
    configured["data"] |= {"ingress": "{}"}
    kserve.server.put(configured)
    running = kserve.server.find("Deployment", "llmisvc-controller-manager", "kserve")
    (manager,) = running["spec"]["template"]["spec"]["containers"]
    manager["image"] = "docker.io/kserve/llmisvc-controller:v0.19.0"
    kserve.server.put(running)
    with pytest.raises(ConfigError, match=r"KServe 0\.19 does not split traffic among LLMInferenceServices"):
        mode(kserve, "llm")
    manager["image"] = "docker.io/kserve/llmisvc-controller:v0.21.0"
    manager["env"] = [{"name": "LLM_INFERENCE_SERVICE_CONFIG_PREFIX", "value": "v3-"}]
    kserve.server.put(running)
    with pytest.raises(NotInstalled, match="no LLMInferenceServiceConfig v3-config-llm-template"):
        mode(kserve, "llm")


def test_a_version_that_cannot_be_read_is_not_guessed(serve: Serve) -> None:
    kserve = serve(version="latest")
    with pytest.raises(ConfigError, match="KServe's version can't be read"):
        mode(kserve)
    schema: dict[str, Any] = {"properties": {"spec": {"properties": {"predictor": {}}}}}
    versions = [{"name": "v1beta1", "schema": {"openAPIV3Schema": schema}}]
    metadata = {"name": "inferenceservices.serving.kserve.io"}
    definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": metadata}
    kserve.server.put(definition | {"spec": {"versions": versions}})
    assert mode(kserve) == "route"


def test_a_namespace_without_the_runtime_says_how_to_get_it(standard: OnKServe) -> None:
    standard.server.remove("ServingRuntime", "slipway-vllm")
    with pytest.raises(NotInstalled, match="no ServingRuntime slipway-vllm") as raised:
        standard.connect()
    assert "manifests/kserve" in raised.value.hint


def test_the_program_names_every_mistake_in_its_environment_variable_at_once(standard: OnKServe) -> None:
    settings = {VARIABLE: '{"clain": "models", "scaling": {"minimum": 4}}'}
    variables = environment(standard.store) | settings
    said = stage("rollout", "--target", "kserve", variables=variables)
    assert said.returncode == ConfigError.exit_code
    assert "2 mistakes in SLIPWAY_KSERVE" in said.stderr
    assert "is above maximum" in said.stderr
    assert "did you mean 'claim'" in said.stderr
