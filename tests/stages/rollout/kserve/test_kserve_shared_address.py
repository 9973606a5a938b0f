"""One host name for all models of a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cluster.manifests import EXAMPLE, documents_of
from pipeline.settings.config import load
from stages.parts.base.errors import ConfigError, NotInstalled
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.rollout.kserve.modes import MODES as ALL_MODES
from stages.rollout.kserve.modes import render
from stages.rollout.kserve.objects import PART_OF, KServeEndpoint
from stages.rollout.kserve.settings import KServe
from stages.rollout.kserve.shared_address import KINDS, SHARED
from tests.adapters import untrained, write
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT

HOST = "models.example.com"
RELEASE = "0001-fp16-aaaaaaaaaaaa"


def objects(folder: Path, mode: str = "route", **settings: str) -> dict[str, dict[str, Any]]:
    """The objects of the shared address, by kind."""
    at = KServeEndpoint(
        ModelStore(folder, "org/name"), Serving(), KServe.model_validate({"shared_host": HOST} | settings), "slipway"
    )
    (folder / "org--name" / "releases" / RELEASE).mkdir(parents=True, exist_ok=True)
    kinds = {kind.name for kind in KINDS}
    return {body["kind"]: body for body in render(at, RELEASE, None, mode, 100) if body["kind"] in kinds}


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_request_that_names_a_model_goes_to_the_models_own_address(tmp_path: Path, mode: str) -> None:
    made = objects(tmp_path, mode)
    route, service, backend = (made[kind]["spec"] for kind in ("AIGatewayRoute", "AIServiceBackend", "Backend"))
    assert route["hostnames"] == [HOST, f"list.{HOST}"]
    assert route["parentRefs"] == [{"name": "kserve-ingress-gateway", "namespace": "kserve"}]
    (rule,) = route["rules"]
    assert [match["headers"][0]["value"] for match in rule["matches"]] == ["org/name"]
    assert rule["backendRefs"][0]["name"] == made["AIServiceBackend"]["metadata"]["name"]
    assert service["backendRef"]["name"] == made["Backend"]["metadata"]["name"]
    (own,) = backend["endpoints"]
    assert own == {"fqdn": {"hostname": own["hostname"], "port": 80}, "hostname": own["hostname"]}
    assert own["hostname"].endswith("-slipway.example.com")


def test_the_gateways_proxies_are_reached_inside_of_the_cluster_under_the_models_own_host_name(tmp_path: Path) -> None:
    made = objects(tmp_path, shared_through="envoy-kserve-1.envoy-gateway-system.svc.cluster.local:8080")
    (own,) = made["Backend"]["spec"]["endpoints"]
    assert own["fqdn"] == {"hostname": "envoy-kserve-1.envoy-gateway-system.svc.cluster.local", "port": 8080}
    assert own["hostname"].endswith("-slipway.example.com")


def test_adapters_are_reached_by_their_own_names(tmp_path: Path) -> None:
    write(tmp_path / "org--name" / "releases" / RELEASE / "adapters" / "legal", untrained())
    (rule,) = objects(tmp_path)["AIGatewayRoute"]["spec"]["rules"]
    assert [match["headers"][0]["value"] for match in rule["matches"]] == ["org/name", "legal"]


def test_an_unknown_model_is_404_in_openais_form(tmp_path: Path) -> None:
    made = objects(tmp_path)
    spec = made["BackendTrafficPolicy"]["spec"]
    assert spec["targetRefs"][0]["name"] == made["AIGatewayRoute"]["metadata"]["name"]
    (override,) = spec["responseOverride"]
    assert (override["match"]["statusCodes"][0]["value"], override["source"]) == (404, "Local")
    error = json.loads(override["response"]["body"]["inline"])["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "/v1/models" in error["message"]


def test_the_models_own_policies_do_not_take_the_key_at_the_shared_address(tmp_path: Path) -> None:
    labels = objects(tmp_path)["AIGatewayRoute"]["metadata"]["labels"]
    assert SHARED.items() <= labels.items()
    assert not PART_OF.items() <= labels.items()
    config = load(chosen={"platform": "gke"}, assignments=[f"kserve.shared_host={HOST}"])
    cluster = config.cluster.model_copy(update={"clients": EXAMPLE})
    config = config.model_copy(update={"platform": config.platform.model_copy(update={"cluster": cluster})})
    policies = {
        body["metadata"]["name"]: body["spec"] for body in documents_of(config) if body["kind"] == "SecurityPolicy"
    }
    shared, own = policies["slipway-shared-address"], policies["slipway-endpoints"]
    routes = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute"}
    assert shared["targetSelectors"] == [routes | {"matchLabels": SHARED}]
    assert shared["apiKeyAuth"]["credentialRefs"] == own["apiKeyAuth"]["credentialRefs"]
    assert "sanitize" not in shared["apiKeyAuth"]
    assert own["apiKeyAuth"]["sanitize"] is True


def test_without_clients_or_a_shared_host_there_is_no_policy_of_it(tmp_path: Path) -> None:
    for assignments in ([], [f"kserve.shared_host={HOST}"]):
        config = load(chosen={"platform": "gke"}, assignments=assignments)
        assert "slipway-shared-address" not in {body["metadata"]["name"] for body in documents_of(config)}


@pytest.mark.parametrize("mode", MODES)
def test_a_model_joins_the_address_when_it_is_served_and_leaves_it_with_its_last_release(
    serve: Callable[..., OnKServe], mode: str
) -> None:
    kserve = serve(**MODES[mode])
    kserve.settings = kserve.settings.model_copy(update={"shared_host": HOST})
    kserve.first()
    names = {kind.name: [body["metadata"]["name"] for body in kserve.server.all(kind.name)] for kind in KINDS}
    assert names == {kind.name: [f"{kserve.name}-shared"] for kind in KINDS}
    kserve.connect().withdraw(GOOD, first=True)
    assert not any(kserve.server.all(kind.name) for kind in KINDS)


def test_a_canary_does_not_change_the_address_and_its_promotion_brings_its_adapters(standard: OnKServe) -> None:
    standard.settings = standard.settings.model_copy(update={"shared_host": HOST})
    standard.first()
    (before,) = standard.server.all("AIGatewayRoute")
    standard.make(NEXT)
    write(standard.store.releases / NEXT / "adapters" / "legal", untrained())
    target = standard.connect()
    target.deploy(NEXT)
    assert standard.server.all("AIGatewayRoute") == [before]
    standard.roll(NEXT)
    (after,) = standard.server.all("AIGatewayRoute")
    assert len(after["spec"]["rules"][0]["matches"]) == 2


def test_without_envoy_ai_gateway_a_rollout_says_what_to_install_before_it_starts_anything(standard: OnKServe) -> None:
    standard.settings = standard.settings.model_copy(update={"shared_host": HOST})
    standard.server.unregister("aigateway.envoyproxy.io/v1beta1", "aigatewayroutes")
    standard.make(GOOD)
    with pytest.raises(NotInstalled, match="no kind AIGatewayRoute") as raised:
        standard.roll(GOOD)
    assert "Envoy AI Gateway 1.0" in raised.value.hint
    assert standard.services() == []


@pytest.mark.parametrize("host", ["Models.example.com", "models example", "https://models.example.com"])
def test_what_is_no_host_name_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"kserve\.shared_host"):
        load(chosen={"platform": "gke"}, assignments=[f"kserve.shared_host={yaml.safe_dump(host)}"])
