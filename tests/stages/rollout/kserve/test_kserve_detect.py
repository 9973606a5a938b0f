"""Which way of splitting traffic is used on a cluster, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stages.parts.base.errors import ConfigError, NotInstalled
from stages.rollout.kserve.detect import detect
from stages.rollout.kserve.settings import VARIABLE, KServe
from tests.serving import environment, stage
from tests.stages.rollout.kserve.on_kserve import OnKServe

Serve = Callable[..., OnKServe]


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
