"""Clients of a cluster's endpoints: keys in Secrets, and what the gateway is told."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.cluster.doctor import check_cluster
from pipeline.cluster.install import ObjectChange, install, uninstall
from pipeline.settings.config import RunConfig, load
from stages.parts.base.errors import ConfigError, NotInstalled, UnknownName
from stages.parts.cluster.api import Cluster
from tests.kubernetes import KubernetesServer, Resource
from tests.pipeline.argo.argo_bench import PLATFORM, namespace, with_kserve

NAMESPACE = "slipway"
KINDS = {
    "SecurityPolicy": "securitypolicies",
    "BackendTrafficPolicy": "backendtrafficpolicies",
    "EnvoyExtensionPolicy": "envoyextensionpolicies",
}
NAMED = """
clients:
  - {name: search, secret: keys, models: [org/a], tokens_per_minute: 2000}
  - {name: reports, secret: others, requests_per_minute: 60}
"""
PASSING = "  - {name: passing, secret: keys}\n"


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    (tmp_path / "clients.yaml").write_text(NAMED)
    return tmp_path / "clients.yaml"


@pytest.fixture
def platform(clients: Path) -> RunConfig:
    path = clients.with_name("ours.yaml")
    path.write_text(yaml.safe_dump({"extends": PLATFORM, "cluster": {"clients": {"file": clients.name}}}))
    return load(chosen={"platform": str(path)})


@pytest.fixture
def guarded(server: KubernetesServer, there: Cluster) -> Cluster:
    """A cluster with Envoy Gateway and our namespace."""
    server.put(namespace(NAMESPACE))
    for kind, plural in KINDS.items():
        server.register(Resource("gateway.envoyproxy.io/v1alpha1", kind, plural, status=True))
    return there


Said = Callable[..., str]


@pytest.fixture
def said(
    server: KubernetesServer, guarded: Cluster, platform: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Said:
    """What ``slipway clients`` prints."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("SLIPWAY_PLATFORM", str(tmp_path / "ours.yaml"))
    monkeypatch.setenv("SLIPWAY_ENGINE", "argo")

    def run(*arguments: str) -> str:
        return CliRunner().invoke(app, ["clients", *arguments], catch_exceptions=False).stdout

    return run


def keys(server: KubernetesServer, secret: str) -> dict[str, str]:
    data = server.find("Secret", secret, NAMESPACE).get("data", {})
    return {name: base64.b64decode(value).decode() for name, value in data.items()}


def test_a_key_is_written_into_the_secret_shown_once_replaced_and_removed(server: KubernetesServer, said: Said) -> None:
    first = said("add", "search").strip()
    assert keys(server, "keys") == {"search": first}
    assert first.startswith("sk-slipway-")
    other = yaml.safe_load(said("add", "reports", "--json"))
    assert keys(server, "others") == {"reports": other["key"]}
    second = said("rotate", "search").strip()
    assert keys(server, "keys") == {"search": second} != {"search": first}
    third = said("rotate", "reports").strip()
    assert keys(server, "others") == {"reports": third}
    assert not {second, third} & set(said("list").split())
    listed = yaml.safe_load(said("list", "--json"))
    assert [(each["name"], each["secret"], each["key"]) for each in listed] == [
        ("search", "keys", True),
        ("reports", "others", True),
    ]
    assert said("rm", "search") == "removed search\n"
    assert keys(server, "keys") == {}
    assert [each["key"] for each in yaml.safe_load(said("list", "--json"))] == [False, True]
    assert server.mistakes == []


def test_what_install_applies_leaves_the_keys_alone(
    server: KubernetesServer, guarded: Cluster, platform: RunConfig, said: Said
) -> None:
    key = said("add", "search").strip()
    for _ in range(2):
        states = {f"{each.kind} {each.name}": each.state for each in install_all(guarded, platform)}
        assert keys(server, "keys") == {"search": key}
    assert set(states.values()) == {"unchanged"}
    assert {f"{kind} slipway-clients" for kind in list(KINDS)[1:]} | {"Secret others"} <= states.keys()
    assert keys(server, "others") == {}
    assert said("add", "reports").strip() == keys(server, "others")["reports"]


def install_all(cluster: Cluster, platform: RunConfig) -> list[Any]:
    return install(cluster, platform, dry_run=False, force=False)


def test_a_client_that_is_there_or_that_the_file_does_not_name_is_refused(said: Said) -> None:
    said("add", "search")
    with pytest.raises(ConfigError, match="there is a client 'search'") as twice:
        said("add", "search")
    assert "rotate search --engine argo" in twice.value.hint
    for command in ("add", "rotate", "rm"):
        with pytest.raises(UnknownName, match="unknown client 'serch'") as unknown:
            said(command, "serch")
        assert "did you mean 'search'" in unknown.value.hint
    with pytest.raises(UnknownName, match="unknown client 'reports'"):
        said("rotate", "reports")  # it has no key yet


def test_clients_with_tokens_have_no_keys(clients: Path, said: Said) -> None:
    tokens = "{issuer: https://login, jwks_uri: https://login/keys, audiences: [slipway]}"
    clients.write_text(f"{{tokens: {tokens}, clients: [{{name: search, cache_salt: {'s' * 22}}}]}}")
    for command in ("add", "rotate", "rm"):
        with pytest.raises(ConfigError, match="clients have no keys: they come with tokens of https://login"):
            said(command, "search")
    (listed,) = yaml.safe_load(said("list", "--json"))
    assert (listed["key"], listed["cache_salt"]) == (None, True)
    assert "Key" not in said("list")


GATEWAY: dict[str, Any] = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "Gateway",
    "metadata": {"name": "kserve-ingress-gateway", "namespace": "kserve"},
    "spec": {},
}
WITH_PROXY = {"infrastructure": {"parametersRef": {"kind": "EnvoyProxy", "name": "slipway-usage"}}}


@pytest.fixture
def counted(server: KubernetesServer, guarded: Cluster, tmp_path: Path) -> RunConfig:
    """A platform with usage, installed; its Gateway does not name the EnvoyProxy yet."""
    with_kserve(server)
    server.register(Resource("gateway.envoyproxy.io/v1alpha1", "EnvoyProxy", "envoyproxies"))
    server.register(Resource("gateway.networking.k8s.io/v1", "Gateway", "gateways"))
    server.put(namespace("envoy-gateway-system"))
    server.put(GATEWAY)
    path = tmp_path / "ours.yaml"
    settings = {"file": "clients.yaml", "usage_secret": "database"}
    path.write_text(yaml.safe_dump({"extends": PLATFORM, "cluster": {"clients": settings}}))
    config = load(chosen={"platform": str(path)})
    install_all(guarded, config)
    return config


@pytest.mark.usefixtures("said")
def test_doctor_says_why_no_usage_is_kept(server: KubernetesServer, guarded: Cluster, counted: RunConfig) -> None:
    assert "does not use EnvoyProxy slipway-usage" in checked(guarded, counted)[1]
    server.put(GATEWAY | {"spec": WITH_PROXY})
    assert "no Secret envoy-gateway-system/database" in checked(guarded, counted)[1]
    secret = {"name": "database", "namespace": "envoy-gateway-system"}
    server.put({"apiVersion": "v1", "kind": "Secret", "metadata": secret, "data": {}})
    assert checked(guarded, counted) == ("warning", "without a key: search, reports")


def test_what_the_gateway_names_is_left_in_place(
    server: KubernetesServer, guarded: Cluster, counted: RunConfig
) -> None:
    def proxy() -> ObjectChange:
        changes = uninstall(guarded, counted, models=False, dry_run=True, force=True)
        (found,) = [each for each in changes if each.kind == "EnvoyProxy"]
        return found

    assert proxy().state == "would be removed"
    server.put(GATEWAY | {"spec": WITH_PROXY})
    assert proxy().state == "kept"
    assert "the Gateway kserve-ingress-gateway names it" in proxy().reason


def test_limits_belong_into_the_file(said: Said) -> None:
    with pytest.raises(ConfigError, match="--model, --tokens-per-minute") as refused:
        said("add", "search", "--model", "org/a", "--tokens-per-minute", "5")
    assert "slipway install" in refused.value.hint


def test_a_platform_without_clients_is_named(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_PLATFORM", PLATFORM)
    with pytest.raises(ConfigError, match=f"the platform {PLATFORM} names no clients"):
        said("list")


def test_a_key_of_a_client_that_the_file_names_no_more_can_be_removed(
    server: KubernetesServer, clients: Path, said: Said
) -> None:
    said("add", "search")
    clients.write_text("clients: [{name: reports, secret: keys}]")
    assert said("rm", "search") == "removed search\n"
    assert keys(server, "keys") == {}


def test_a_client_keeps_its_secret_and_of_two_keys_the_first_counts(
    server: KubernetesServer, clients: Path, said: Said
) -> None:
    said("add", "search")
    clients.write_text(NAMED.replace("name: search, secret: keys", "name: search, secret: others") + PASSING)
    second = said("rotate", "search").strip()
    assert keys(server, "keys")["search"] == second
    other = {"name": "others", "namespace": NAMESPACE}
    server.put({"apiVersion": "v1", "kind": "Secret", "metadata": other, "data": {"search": "b2xk"}})
    third = said("rotate", "search").strip()
    assert (keys(server, "keys")["search"], keys(server, "others")["search"]) == (second, third)


def test_without_envoy_gateway_nothing_is_applied(
    server: KubernetesServer, there: Cluster, platform: RunConfig
) -> None:
    before = server.objects.version
    with pytest.raises(NotInstalled, match=r"has no kind \w+Policy of gateway.envoyproxy.io") as missing:
        install_all(there, platform)
    assert missing.value.hint == "install Envoy Gateway 1.9 or newer"
    assert server.objects.version == before


def checked(cluster: Cluster, platform: RunConfig) -> tuple[str, str]:
    state, found, _ = check_cluster(cluster, platform)["clients"]
    return state, found


def test_doctor_says_what_the_clients_lack(
    server: KubernetesServer, there: Cluster, platform: RunConfig, said: Said
) -> None:
    with_kserve(server)
    assert "no SecurityPolicy slipway/slipway-endpoints" in checked(there, platform)[1]
    install_all(there, platform)
    assert checked(there, platform) == ("warning", "without a key: search, reports")
    said("add", "search")
    said("add", "reports")
    assert checked(there, platform) == ("warning", "not served: org/a")
    condition = {"type": "Accepted", "status": "False", "message": "enable Ratelimit", "reason": "Invalid"}
    status: dict[str, Any] = {"ancestors": [{"conditions": [condition]}]}
    server.set_status("BackendTrafficPolicy", NAMESPACE, "slipway-clients", status)
    assert checked(there, platform) == ("missing", "BackendTrafficPolicy slipway/slipway-clients: enable Ratelimit")
    server.set_status("BackendTrafficPolicy", NAMESPACE, "slipway-clients", {})
    secret = {"name": "slipway-api", "namespace": NAMESPACE}
    server.put({"apiVersion": "v1", "kind": "Secret", "metadata": secret, "data": {}})
    assert checked(there, platform)[0] == "missing"
    server.unregister("gateway.envoyproxy.io/v1alpha1", "securitypolicies")
    state, _, hint = check_cluster(Cluster(there.login, NAMESPACE), platform)["clients"]
    assert (state, hint) == ("missing", "install Envoy Gateway 1.9 or newer")


def test_clients_that_are_served_are_ok(
    server: KubernetesServer, there: Cluster, platform: RunConfig, clients: Path, said: Said
) -> None:
    clients.write_text("clients: [{name: search, secret: keys}]")
    install_all(there, platform)
    said("add", "search")
    assert checked(there, platform) == ("ok", "search")


def test_uninstall_removes_them(server: KubernetesServer, there: Cluster, platform: RunConfig, said: Said) -> None:
    install_all(there, platform)
    said("add", "search")
    done = {f"{each.kind} {each.name}": each.state for each in remove_all(there, platform)}
    assert {done[f"{kind} slipway-clients"] for kind in list(KINDS)[1:]} == {"removed"}
    assert done["SecurityPolicy slipway-endpoints"] == done["Secret keys"] == "removed"
    assert [server.all(kind) for kind in (*KINDS, "Secret")] == [[]] * 4


def remove_all(cluster: Cluster, platform: RunConfig) -> list[Any]:
    return uninstall(cluster, platform, models=False, dry_run=False, force=False)
