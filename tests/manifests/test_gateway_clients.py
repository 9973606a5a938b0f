"""What clients.yaml becomes for Envoy Gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cluster.gateway import of
from pipeline.cluster.manifests import CLIENTS, MANIFESTS, documents_of
from pipeline.settings.config import load
from pipeline.settings.platform import ClientSettings
from stages.parts.base.errors import ConfigError
from stages.parts.base.settings import CONFIGS
from stages.parts.endpoint.routing import OFFERED
from stages.rollout.kserve.detect import as_configured
from stages.rollout.kserve.objects import endpoint_name
from stages.rollout.kserve.settings import KServe

HEADER = "x-slipway-client"
THREE = """
clients:
  - {name: search, secret: keys, models: [org/a, org/b], requests_per_minute: 600, tokens_per_minute: 2000}
  - {name: reports, secret: others, models: [org/a], tokens_per_minute: 70}
  - {name: everything, secret: keys}
"""


def rendered(folder: Path, text: str = THREE, namespace: str = "models", **settings: Any) -> dict[str, dict[str, Any]]:
    """The objects by kind; Secrets by their kind and name."""
    file = folder / "clients.yaml"
    file.write_text(text)
    found = of(namespace, ClientSettings(file=str(file), **settings), "slim:1")
    names = [each["kind"] + (f" {each['metadata']['name']}" if each["kind"] == "Secret" else "") for each in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def allowed(policy: dict[str, Any], client: str, host: str, path: str, method: str) -> bool:
    """What the policy says of a request with *client*'s key."""
    for rule in policy["spec"]["authorization"]["rules"]:
        assert rule["action"] == "Allow"
        (header,) = rule["principal"]["headers"]
        assert header["name"] == HEADER
        operation = rule["operation"]
        assert operation["path"]["type"] == "Exact"
        starts = [part.split("'")[1] for part in rule.get("cel", "request.host.startsWith('')").split(" || ")]
        if (
            client in header["values"]
            and (operation["methods"], operation["path"]["value"]) == ([method], path)
            and any(host.startswith(start) for start in starts)
        ):
            return True
    assert policy["spec"]["authorization"]["defaultAction"] == "Deny"
    return False


def host(model: str, template: str = "", namespace: str = "models", named_for: str = "models") -> str:
    ingress = {"ingressDomain": "example.com", "domainTemplate": template}
    return as_configured("route", KServe(), ingress).hostname(endpoint_name(model, named_for), namespace)


@pytest.mark.parametrize("template", ["", "{{ .Name }}.{{ .Namespace }}.{{ .IngressDomain }}"])
def test_each_client_may_ask_its_models_what_an_endpoint_offers_and_nothing_else(tmp_path: Path, template: str) -> None:
    policy = rendered(tmp_path)["SecurityPolicy"]
    may = {
        (client, model): {
            path for path, method in OFFERED.items() if allowed(policy, client, host(model, template), path, method)
        }
        for client in ("search", "reports", "everything", "nobody")
        for model in ("org/a", "org/b", "org/c")
    }
    full, nothing = set(OFFERED), set[str]()
    assert [may["search", each] for each in ("org/a", "org/b", "org/c")] == [full, full, nothing]
    assert [may["reports", each] for each in ("org/a", "org/b", "org/c")] == [full, nothing, nothing]
    assert [may["everything", each] for each in ("org/a", "org/b", "org/c")] == [full, full, full]
    assert [may["nobody", each] for each in ("org/a", "org/b", "org/c")] == [nothing, nothing, nothing]
    assert not allowed(policy, "everything", host("org/a"), "/invocations", "POST")
    assert not allowed(policy, "everything", host("org/a"), "/health", "POST")


def test_an_endpoint_in_a_namespace_with_a_long_name_is_known_by_its_names(tmp_path: Path) -> None:
    model, namespace = f"org/{'a' * 30}", "n" * 25
    text = f"clients: [{{name: search, secret: keys, models: [{model}]}}]"
    policy = rendered(tmp_path, text, namespace=namespace)["SecurityPolicy"]
    names = {host(model, namespace=namespace, named_for=each) for each in (namespace, "")}
    assert len(names) == 2, "today's and that of older versions"
    assert all(allowed(policy, "search", each, path, method) for each in names for path, method in OFFERED.items())


def test_the_key_is_taken_from_the_request_and_is_in_nothing_that_is_rendered(tmp_path: Path) -> None:
    found = rendered(tmp_path)
    assert found["SecurityPolicy"]["spec"]["apiKeyAuth"] == {
        "credentialRefs": [{"name": "keys"}, {"name": "others"}],
        "extractFrom": [{"headers": ["Authorization"]}],
        "forwardClientIDHeader": HEADER,
        "sanitize": True,
    }
    for name in ("keys", "others"):
        assert found[f"Secret {name}"].keys() == {"apiVersion", "kind", "metadata", "type"}


def test_one_policy_of_each_kind_selects_the_routes_of_all_endpoints(tmp_path: Path) -> None:
    found = rendered(tmp_path)
    labels = {"app.kubernetes.io/part-of": "slipway"}
    selector = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "matchLabels": labels}
    of_kserve = [{"key": "serving.kserve.io/routing-group", "operator": "Exists"}]
    other = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "matchExpressions": of_kserve}
    for kind in ("SecurityPolicy", "BackendTrafficPolicy", "EnvoyExtensionPolicy"):
        assert found[kind]["spec"]["targetSelectors"] == [selector, other]
        assert found[kind]["metadata"]["namespace"] == "models"
    routes = yaml.safe_load((MANIFESTS / "envoy-gateway/routes.yaml").read_text())
    assert found["SecurityPolicy"]["metadata"]["name"] == routes["metadata"]["name"], "they would contradict each other"


def test_requests_and_tokens_count_by_client_over_all_routes(tmp_path: Path) -> None:
    rules = rendered(tmp_path)["BackendTrafficPolicy"]["spec"]["rateLimit"]["global"]["rules"]
    assert all(each["shared"] for each in rules)
    said = []
    for rule in rules:
        ((selector,),) = ([header for each in rule["clientSelectors"] for header in each["headers"]],)
        assert (selector["name"], selector["type"], rule["limit"]["unit"]) == (HEADER, "Exact", "Minute")
        said.append((selector["value"], rule["limit"]["requests"], rule.get("cost")))
    spent = {"from": "Metadata", "metadata": {"namespace": "slipway", "key": "tokens"}}
    cost = {"request": {"from": "Number", "number": 0}, "response": spent}
    assert said == [("search", 600, None), ("search", 2000, cost), ("reports", 70, cost)]


def test_refusals_have_openais_body(tmp_path: Path) -> None:
    overrides = rendered(tmp_path)["BackendTrafficPolicy"]["spec"]["responseOverride"]
    kinds, headers = {}, {}
    for each in overrides:
        assert each["source"] == "Local"
        ((status,),) = ([code["value"] for code in each["match"]["statusCodes"]],)
        kinds[status] = json.loads(each["response"]["body"]["inline"])["error"]["type"]
        headers[status] = [header["name"] for header in each["response"].get("header", {}).get("set", [])]
    assert kinds == {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    assert headers == {401: ["www-authenticate"], 403: [], 429: ["retry-after"]}


def test_without_limits_nothing_is_counted(tmp_path: Path) -> None:
    found = rendered(tmp_path, "clients: [{name: a, secret: keys}]")
    assert "EnvoyExtensionPolicy" not in found
    assert "rateLimit" not in found["BackendTrafficPolicy"]["spec"]
    counted = rendered(tmp_path, "clients: [{name: a, secret: keys, requests_per_minute: 1}]")
    assert "EnvoyExtensionPolicy" not in counted
    assert "rateLimit" in counted["BackendTrafficPolicy"]["spec"]


def test_only_the_gateway_the_rollout_the_scheduler_and_prometheus_reach_the_pods(tmp_path: Path) -> None:
    named = rendered(tmp_path, gateway="edge/public", proxies="proxies", prometheus="metrics")["NetworkPolicy"]["spec"]
    (ingress,) = named["ingress"]
    gateway, rollout, scheduler, prometheus = ingress["from"]
    labels = "gateway.envoyproxy.io/owning-gateway-"
    assert gateway == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "proxies"}},
        "podSelector": {"matchLabels": {f"{labels}namespace": "edge", f"{labels}name": "public"}},
    }
    assert rollout["podSelector"]["matchExpressions"][0]["values"] == ["rollout", "ending"]
    component = {"app.kubernetes.io/component": "llminferenceservice-router-scheduler"}
    assert scheduler == {"podSelector": {"matchLabels": component}}
    assert prometheus == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "metrics"}}}
    assert len(rendered(tmp_path)["NetworkPolicy"]["spec"]["ingress"][0]["from"]) == 3


def test_a_certificate_is_asked_for_in_the_gateways_namespace(tmp_path: Path) -> None:
    found = rendered(tmp_path, gateway="edge/public", issuer="ours", hosts=("*.example.com",))["Certificate"]
    assert found["metadata"]["namespace"] == "edge"
    assert (found["spec"]["dnsNames"], found["spec"]["issuerRef"]["name"]) == (["*.example.com"], "ours")
    assert "Certificate" not in rendered(tmp_path)


@pytest.mark.parametrize(
    ("client", "why"),
    [
        ("{name: a}", "a has no secret"),
        ("{name: a, secret: keys, value: b}", "a has a value, but there are no tokens"),
        ("{name: a, secret: keys, money_per_month: 5}", "money_per_month of a needs prices"),
        ("{name: a, secret: keys, tokens_per_month: 4294967296}", "can't exceed 4,294,967,295"),
        ("{name: a, secret: keys, cache_salt: short}", "cache_salt"),
        ("{name: a, secret: keys, models: ['../etc']}", "is not a model's name"),
        ("{name: a, secret: keys, model: org/a}", "unknown field"),
        ("{name: a, secret: keys, requests_per_minute: 0}", "greater than or equal to 1"),
        ("{name: a, secret: keys, requests_at_once: 4}", "requests_at_once is for one machine"),
        ("{name: a, secret: slipway-hub}", "is for something else"),
        ("{name: default, secret: keys}", "can't be the name of a client"),
        ("{name: a, secret: keys}, {name: a, secret: others}", "named twice: a"),
        ("", "names no client"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, client: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        rendered(tmp_path, f"clients: [{client}]")


def test_tokens_and_keys_in_one_file_are_refused(tmp_path: Path) -> None:
    tokens = "{issuer: https://a, jwks_uri: https://a/keys, audiences: [slipway]}"
    with pytest.raises(ConfigError, match="would demand both of each request"):
        rendered(tmp_path, f"{{tokens: {tokens}, clients: [{{name: a, secret: keys}}]}}")
    with pytest.raises(ConfigError, match="audiences"):
        rendered(tmp_path, "{tokens: {issuer: https://a, jwks_uri: https://a/keys}, clients: [{name: a}]}")


def test_a_months_budget_counts_tokens_and_money_and_says_so(tmp_path: Path) -> None:
    limits = "tokens_per_minute: 10, tokens_per_month: 1000, money_per_month: 12.5"
    text = f"{{prices: {{default: {{prompt: 1, output: 2}}}}, clients: [{{name: a, secret: keys, {limits}}}]}}"
    spec = rendered(tmp_path, text)["BackendTrafficPolicy"]["spec"]
    said = [
        (rule["limit"]["requests"], rule["limit"]["unit"], rule["cost"]["response"]["metadata"]["key"])
        for rule in spec["rateLimit"]["global"]["rules"]
    ]
    assert said == [(10, "Minute", "tokens"), (1000, "Month", "tokens"), (125_000, "Month", "money")]
    first, *others = spec["responseOverride"]
    assert "per month is used up" in first["response"]["body"]["inline"]
    assert first["match"]["responseHeaders"][0]["name"] == "x-ratelimit-reset"
    assert not [each for each in others if "responseHeaders" in each["match"]]


def test_requests_of_a_second_count_last_and_are_refused_until_the_next_one(tmp_path: Path) -> None:
    text = "clients: [{name: a, secret: keys, requests_per_second: 2, requests_per_minute: 60}]"
    spec = rendered(tmp_path, text)["BackendTrafficPolicy"]["spec"]
    said = [(rule["limit"]["requests"], rule["limit"]["unit"]) for rule in spec["rateLimit"]["global"]["rules"]]
    assert said == [(60, "Minute"), (2, "Second")]
    first = spec["responseOverride"][0]
    assert first["match"]["responseHeaders"][0]["value"]["value"] == "1"
    assert first["response"]["header"]["set"] == [{"name": "retry-after", "value": "1"}]
    assert "requests per second" in first["response"]["body"]["inline"]


def test_a_salt_is_added_to_bodies_as_long_as_on_one_machine(tmp_path: Path) -> None:
    salted = "clients: [{name: a, secret: keys, cache_salt: abcdefghijklmnop}]"
    assert rendered(tmp_path, salted)["BackendTrafficPolicy"]["spec"]["requestBuffer"] == {"limit": "64Mi"}
    assert "requestBuffer" not in rendered(tmp_path)["BackendTrafficPolicy"]["spec"]


def test_the_address_of_all_models_demands_the_clients_tokens_too(tmp_path: Path) -> None:
    file = tmp_path / "clients.yaml"
    tokens = "{issuer: https://a, jwks_uri: https://a/keys, audiences: [slipway]}"
    file.write_text(f"{{tokens: {tokens}, clients: [{{name: a}}]}}")
    found = of("models", ClientSettings(file=str(file)), "slim:1", KServe(shared_host="models.example.com"))
    own, shared = (body["spec"]["jwt"]["providers"][0] for body in found if body["kind"] == "SecurityPolicy")
    assert shared == own
    assert "EnvoyExtensionPolicy" not in [body["kind"] for body in found]  # who may use all models sees all


def test_usage_is_kept_beside_the_proxies_of_the_gateway(tmp_path: Path) -> None:
    found = rendered(tmp_path, gateway="edge/public", usage_secret="database")["EnvoyProxy"]
    assert found["metadata"]["namespace"] == "edge"
    deployment = found["spec"]["provider"]["kubernetes"]["envoyDeployment"]
    (importer,) = deployment["initContainers"]
    assert (importer["image"], importer["restartPolicy"]) == ("slim:1", "Always")
    assert importer["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "database", "key": "url"}
    mounts = {each["name"] for each in importer["volumeMounts"] + deployment["container"]["volumeMounts"]}
    assert mounts == {each["name"] for each in deployment["pod"]["volumes"]}
    assert "EnvoyProxy" not in rendered(tmp_path)


def test_more_limits_than_envoy_gateway_takes_are_refused(tmp_path: Path) -> None:
    many = [f"{{name: c{n}, secret: keys, requests_per_minute: 1, tokens_per_minute: 1}}" for n in range(129)]
    assert rendered(tmp_path, f"clients: [{', '.join(many[:128])}]")
    with pytest.raises(ConfigError, match="takes 256 clients"):
        rendered(tmp_path, f"clients: [{', '.join(many)}]")


def test_a_platform_that_names_clients_installs_them_and_closes_its_pods(tmp_path: Path) -> None:
    (tmp_path / "clients.yaml").write_text(THREE)
    platform = tmp_path / "ours.yaml"
    platform.write_text("extends: gke\nnamespace: models\ncluster: {clients: {file: clients.yaml}}\n")
    found = documents_of(load(chosen={"platform": str(platform)}))
    assert "SecurityPolicy" in {each["kind"] for each in found}
    assert str(tmp_path) not in json.dumps(found), "whoever installs from another folder would change it"
    (policy,) = (each for each in found if each["metadata"]["name"] == "endpoints-answer-the-cluster")
    assert "podSelector" in policy["spec"]["ingress"][0]["from"][0], "everybody in the cluster is still let in"
    assert "SecurityPolicy" not in {each["kind"] for each in documents_of(load(chosen={"platform": "gke"}))}


def test_the_example_is_what_its_file_says() -> None:
    made = list(yaml.safe_load_all((MANIFESTS / CLIENTS).read_text()))
    known = yaml.safe_load((MANIFESTS / CLIENTS.with_name("clients.yaml")).read_text())["clients"]
    assert {each["name"] for each in known} == {"search", "reports"}
    assert {each["kind"] for each in made} == {
        *("Secret", "NetworkPolicy", "SecurityPolicy", "BackendTrafficPolicy", "EnvoyExtensionPolicy", "Certificate")
    }
    assert not (CONFIGS / "clients.yaml").exists()


def test_the_list_of_the_address_of_all_models_is_asked_where_a_script_sees_it(tmp_path: Path) -> None:
    file = tmp_path / "clients.yaml"
    file.write_text("clients: [{name: a, secret: keys, models: [org/name]}, {name: b, secret: keys}]")
    at = KServe(shared_host="models.example.com", shared_through="proxies.svc:8080")
    found = {body["kind"]: body for body in of("models", ClientSettings(file=str(file)), "slim:1", at)}
    route = found["HTTPRoute"]["spec"]
    assert route["hostnames"] == ["models.example.com"]
    (rule,) = route["rules"]
    assert rule["matches"] == [{"path": {"type": "Exact", "value": "/v1/models"}, "method": "GET"}]
    assert rule["filters"][0]["urlRewrite"] == {"hostname": "list.models.example.com"}
    assert found["Backend"]["spec"]["endpoints"] == [{"fqdn": {"hostname": "proxies.svc", "port": 8080}}]
    selected = found["EnvoyExtensionPolicy"]["spec"]["targetSelectors"][0]["matchLabels"]
    assert (
        found["HTTPRoute"]["metadata"]["labels"] == selected
    )  # and not what the policies of models' own routes select
