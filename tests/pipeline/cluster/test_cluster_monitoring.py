"""What install brings to a cluster's Prometheus and Grafana, and where they look for it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from pipeline.cluster.doctor import check_cluster
from pipeline.cluster.install import install, uninstall
from pipeline.cluster.monitoring import DASHBOARD
from pipeline.settings.platform import ClientSettings
from tests.kubernetes.objects import Object, Resource
from tests.pipeline.argo.argo_bench import controller, namespace

STACK = {"matchLabels": {"release": "kube-prometheus-stack"}}


def prometheus(server: Any, name: str = "k8s", home: str = "monitoring", **spec: Any) -> None:
    """A cluster with prometheus-operator, and a Prometheus with these selectors."""
    for kind, plural in (
        ("Prometheus", "prometheuses"),
        ("PodMonitor", "podmonitors"),
        ("PrometheusRule", "prometheusrules"),
    ):
        server.register(Resource("monitoring.coreos.com/v1", kind, plural))
    server.put(namespace(home))
    body = {"apiVersion": "monitoring.coreos.com/v1", "kind": "Prometheus", "spec": spec}
    server.put(body | {"metadata": {"name": name, "namespace": home}})


def selecting(labels: Any = STACK, namespaces: Any = None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for kind in ("podMonitor", "rule"):
        fields |= {f"{kind}Selector": labels, f"{kind}NamespaceSelector": namespaces}
    return {name: value for name, value in fields.items() if value is not None}


def applied(server: Any) -> dict[str, Object]:
    kinds = {kind: server.all(kind) for kind in ("PrometheusRule", "PodMonitor")}
    assert len(kinds["PrometheusRule"]) == bool(kinds["PodMonitor"])
    found = [each for listed in kinds.values() for each in listed]
    return {f"{each['metadata']['namespace']}/{each['metadata']['name']}": each for each in found}


def monitoring(there: Any, platform: Any) -> tuple[str, ...]:
    return tuple(check_cluster(there, platform)["monitoring"])


def test_without_an_operator_nothing_is_brought_and_doctor_says_it_is_off(server, there, platform):
    before = {each.kind for each in install(there, platform, dry_run=False, force=False)}
    assert "PodMonitor" not in before
    state, found, hint = monitoring(there, platform)
    assert (state, found) == ("off", "no prometheus-operator")
    assert "slipway install" in hint


def test_a_prometheus_that_looks_everywhere_gets_the_labels_that_it_selects(server, there, platform):
    prometheus(server, **selecting(namespaces={}))
    assert monitoring(there, platform)[0] == "warning", "not installed yet"
    install(there, platform, dry_run=False, force=False)
    brought = applied(server)
    assert brought.keys() == {"slipway/slipway-endpoints", "slipway/slipway-argo"}
    for body in brought.values():
        assert body["metadata"]["labels"] == {
            "app.kubernetes.io/part-of": "slipway",
            "release": "kube-prometheus-stack",
        }
    state, found, _ = monitoring(there, platform)
    assert (state, found.partition(" takes")[0]) == ("ok", "monitoring/k8s")
    assert {each.state for each in install(there, platform, dry_run=False, force=False)} == {"unchanged"}


@pytest.mark.parametrize("namespaces", [None, {"matchLabels": {"watched": "yes"}}])
def test_a_prometheus_that_looks_in_its_own_namespace_finds_it_there(server, there, platform, namespaces):
    prometheus(server, **selecting(namespaces=namespaces))
    if namespaces:
        watched: dict[str, Any] = namespace("monitoring")
        watched["metadata"]["labels"] = {"watched": "yes"}
        server.put(watched)
    install(there, platform, dry_run=False, force=False)
    brought = applied(server)
    assert brought.keys() == {f"monitoring/slipway-{name}-slipway" for name in ("endpoints", "argo")}
    monitor = server.find("PodMonitor", "slipway-endpoints-slipway", "monitoring")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["slipway"]}
    argo = server.find("PodMonitor", "slipway-argo-slipway", "monitoring")
    assert argo["spec"]["namespaceSelector"] == {"matchNames": ["argo"]}
    assert monitoring(there, platform)[0] == "ok"
    removed = {each.kind: each.state for each in uninstall(there, platform, models=False, dry_run=False, force=False)}
    assert removed["PodMonitor"] == removed["PrometheusRule"] == "removed"
    assert applied(server) == {}


@pytest.mark.parametrize(
    ("selector", "labels"),
    [
        ({}, {}),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["ml", "web"]}]}, {"team": "ml"}),
        ({"matchExpressions": [{"key": "scrape", "operator": "Exists"}]}, {"scrape": "true"}),
        ({"matchExpressions": [{"key": "ignored", "operator": "DoesNotExist"}]}, {}),
    ],
)
def test_every_form_of_selector_is_followed(server, there, platform, selector, labels):
    prometheus(server, **selecting(selector, {}))
    install(there, platform, dry_run=False, force=False)
    for body in applied(server).values():
        assert body["metadata"]["labels"] == {"app.kubernetes.io/part-of": "slipway"} | labels
    assert monitoring(there, platform)[0] == "ok"


def test_a_prometheus_that_can_select_nothing_is_said(server, there, platform):
    part = {"key": "app.kubernetes.io/part-of", "operator": "NotIn", "values": ["slipway"]}
    prometheus(server, **selecting({"matchExpressions": [part]}, {}))
    install(there, platform, dry_run=False, force=False)
    state, found, _ = monitoring(there, platform)
    assert state == "warning"
    assert "PodMonitor slipway/slipway-endpoints: podMonitorSelector does not select it" in found
    assert "PrometheusRule slipway/slipway-endpoints: ruleSelector does not select it" in found


def test_of_several_one_has_to_be_named(server, there, platform):
    prometheus(server, **selecting({}, {}))
    prometheus(server, "team", "team-b", **selecting({"matchLabels": {"for": "team"}}, {}))
    install(there, platform, dry_run=False, force=False)
    assert applied(server) == {}
    state, found, hint = monitoring(there, platform)
    assert (state, found) == ("warning", "2 Prometheuses: monitoring/k8s, team-b/team")
    assert "cluster.prometheus" in hint
    named = platform.platform.cluster.model_copy(update={"prometheus": "team-b/team"})
    chosen = platform.model_copy(update={"platform": platform.platform.model_copy(update={"cluster": named})})
    install(there, chosen, dry_run=False, force=False)
    assert {body["metadata"]["labels"]["for"] for body in applied(server).values()} == {"team"}


def test_whoever_may_not_list_all_namespaces_installs_and_may_name_one(server, there, platform):
    prometheus(server, **selecting({}, {}))
    server.forbidden.add(("list", "prometheuses"))
    install(there, platform, dry_run=False, force=False)
    assert applied(server) == {}
    state, found, hint = monitoring(there, platform)
    assert (state, "may not be seen" in found, "cluster.prometheus" in hint) == ("warning", True, True)
    named = platform.platform.cluster.model_copy(update={"prometheus": "monitoring/k8s"})
    chosen = platform.model_copy(update={"platform": platform.platform.model_copy(update={"cluster": named})})
    install(there, chosen, dry_run=False, force=False)
    assert len(applied(server)) == 2
    assert monitoring(there, chosen)[0] == "ok"


@pytest.mark.parametrize(
    ("data", "scheme"),
    [
        ({}, "https"),
        ({"metricsConfig": "enabled: true\npath: /metrics\nsecure: false"}, "http"),
        ({"metricsConfig": "secure: true"}, "https"),
        ({"config": "parallelism: 3\nmetricsConfig:\n  port: 9090\n  secure: false\nlinks: []"}, "http"),
        ({"config": "metricsConfig:\n  port: 9090\ntelemetryConfig:\n  secure: false"}, "https"),
    ],
)
def test_argos_controller_is_asked_where_it_is_and_as_it_is_set_up(server, there, platform, data, scheme):
    prometheus(server, **selecting({}, {}))
    running = controller("quay.io/argoproj/workflow-controller:v4.1.2")
    running["spec"]["selector"] = {"matchLabels": {"app.kubernetes.io/component": "workflow-controller"}}
    server.put(running)
    metadata = {"name": "workflow-controller-configmap", "namespace": "argo"}
    server.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    install(there, platform, dry_run=False, force=False)
    spec = server.find("PodMonitor", "slipway-argo", "slipway")["spec"]
    assert spec["selector"] == running["spec"]["selector"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert (endpoint["scheme"], "tlsConfig" in endpoint) == (scheme, scheme == "https")


def grafana(server: Any, **variables: str) -> None:
    server.put(namespace("grafana"))
    env = [{"name": name, "value": value} for name, value in variables.items()]
    sidecar = {"name": "grafana-sc-dashboard", "image": "sidecar", "env": env}
    spec = {"selector": {}, "template": {"spec": {"containers": [{"name": "grafana", "image": "grafana"}, sidecar]}}}
    metadata = {"name": "grafana", "namespace": "grafana"}
    server.put({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})


def test_the_dashboard_has_the_label_that_grafanas_sidecar_looks_for(server, there, platform):
    prometheus(server, **selecting({}, {}))
    grafana(server, LABEL="dashboards", LABEL_VALUE="yes", NAMESPACE="ALL")
    install(there, platform, dry_run=False, force=False)
    labels = server.find("ConfigMap", DASHBOARD, "slipway")["metadata"]["labels"]
    assert labels["dashboards"] == "yes"
    assert "grafana_dashboard" not in labels


def test_a_sidecar_that_looks_in_its_own_namespace_finds_the_dashboard_there(server, there, platform):
    prometheus(server, **selecting({}, {}))
    grafana(server, LABEL="grafana_dashboard")
    install(there, platform, dry_run=False, force=False)
    assert server.find("ConfigMap", f"{DASHBOARD}-slipway", "grafana")["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_doctor_says_which_web_hook_is_there(server, there, platform):
    install(there, platform, dry_run=False, force=False)
    state, _, hint = check_cluster(there, platform)["notifications"]
    assert (state, "create secret generic slipway-notify" in hint) == ("off", True)
    metadata = {"name": "slipway-notify", "namespace": there.namespace}
    server.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}})
    assert check_cluster(there, platform)["notifications"][0] == "ok"


@pytest.mark.parametrize("home", [None, "monitoring"])
def test_budgets_of_a_month_are_watched_where_clients_have_some(server, there, platform, tmp_path, home):
    prometheus(server, **selecting(namespaces=None if home else {}))
    for kind, plural in (
        ("SecurityPolicy", "securitypolicies"),
        ("BackendTrafficPolicy", "backendtrafficpolicies"),
        ("EnvoyExtensionPolicy", "envoyextensionpolicies"),
    ):
        server.register(Resource("gateway.envoyproxy.io/v1alpha1", kind, plural, status=True))
    search: dict[str, Any] = {"name": "search", "secret": "keys", "requests_per_minute": 60}
    reports: dict[str, Any] = {"name": "reports", "secret": "keys"}
    for monthly in ({}, {"tokens_per_minute": 100, "tokens_per_month": 3000}):
        (tmp_path / "clients.yaml").write_text(yaml.safe_dump({"clients": [search, reports | monthly]}))
        named = {"clients": ClientSettings(file=str(tmp_path / "clients.yaml"))}
        cluster = platform.platform.cluster.model_copy(update=named)
        chosen = platform.model_copy(update={"platform": platform.platform.model_copy(update={"cluster": cluster})})
        state, found, _ = monitoring(there, chosen)
        assert (state, "slipway-budgets" in found) == ("warning", bool(monthly))
        install(there, chosen, dry_run=False, force=False)
        assert monitoring(there, chosen)[0] == "ok"
    suffix, place = (f"-{there.namespace}", home) if home else ("", there.namespace)
    monitor = server.find("PodMonitor", f"slipway-ratelimit{suffix}", place)
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["envoy-gateway-system"]}
    body = server.find("PrometheusRule", f"slipway-budgets{suffix}", place)
    assert body["metadata"]["labels"]["release"] == monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    (group,) = body["spec"]["groups"]
    kept, alert = group["rules"]
    assert kept["labels"] == {"namespace": there.namespace, "client": "reports", "counted": "tokens", "limit": "3000"}
    policy = server.find("BackendTrafficPolicy", "slipway-clients", there.namespace)
    (rule,) = [
        n for n, each in enumerate(policy["spec"]["rateLimit"]["global"]["rules"]) if each["limit"]["unit"] == "Month"
    ]
    assert f'key2="rule-{rule}-match-0_rule-{rule}-match-0"' in kept["expr"]
    assert alert["alert"] == "SlipwayMonthsBudgetUsedUp"
    uninstall(there, chosen, models=False, dry_run=False, force=False)
    assert server.all("PrometheusRule") == server.all("PodMonitor") == []
