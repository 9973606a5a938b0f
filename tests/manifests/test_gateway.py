"""What a cluster's gateway lets through to endpoints whose routes are made by KServe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pipeline.cluster.manifests import MANIFESTS
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.routing import OFFERED
from stages.rollout.kserve.objects import KServeEndpoint
from stages.rollout.kserve.route import http_route
from stages.rollout.kserve.settings import KServe
from stages.rollout.kserve.standard import inference_service


def policy() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((MANIFESTS / "envoy-gateway/routes.yaml").read_text())["spec"]
    return found


def test_the_policy_allows_what_an_endpoint_offers_on_one_machine_and_denies_the_rest() -> None:
    asked = policy()["authorization"]
    assert asked["defaultAction"] == "Deny"
    operations = [rule["operation"] for rule in asked["rules"] if rule["action"] == "Allow"]
    assert len(operations) == len(asked["rules"])
    assert {each["path"]["type"] for each in operations} == {"Exact"}
    assert {each["path"]["value"]: each["methods"] for each in operations} == {
        path: [method] for path, method in OFFERED.items()
    }
    assert {tuple(rule["principal"]["clientCIDRs"]) for rule in asked["rules"]} == {("0.0.0.0/0", "::/0")}


def test_the_policy_applies_to_the_routes_of_every_endpoint(tmp_path: Path) -> None:
    selector, of_llm = policy()["targetSelectors"]
    assert of_llm["matchExpressions"] == [{"key": "serving.kserve.io/routing-group", "operator": "Exists"}]
    at = KServeEndpoint(ModelStore(tmp_path, "org/name"), Serving(), KServe(), "slipway")
    for labelled in (inference_service(at, {}), http_route(at, "kserve/gateway", "host", [])):
        assert selector["matchLabels"].items() <= labelled["metadata"]["labels"].items()


def test_a_route_of_the_rollout_s_own_matches_what_an_endpoint_offers_and_nothing_else(tmp_path: Path) -> None:
    at = KServeEndpoint(ModelStore(tmp_path, "org/name"), Serving(), KServe(), "slipway")
    (rule,) = http_route(at, "kserve/gateway", "host", [("service", 80, 100)])["spec"]["rules"]
    assert {each["path"]["type"] for each in rule["matches"]} == {"Exact"}
    assert {each["path"]["value"]: each["method"] for each in rule["matches"]} == OFFERED
