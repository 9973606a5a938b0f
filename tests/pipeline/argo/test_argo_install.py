"""Installing on a cluster, and checking one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.argo.doctor import check_cluster
from pipeline.argo.install import install
from pipeline.config import load
from pipeline.definition import NAME
from pipeline.stage_templates import RESOLVE_CACHE
from stages.parts.base.errors import AccessDenied, Conflict, NotInstalled
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CONFIG_MAPS
from tests.kubernetes import KubernetesServer

PLATFORM = "kind"


@pytest.fixture
def platform():
    return load(chosen={"platform": PLATFORM})


@pytest.fixture
def there(server: KubernetesServer, cluster: Cluster, platform) -> Cluster:
    """With Argo's own namespace, as its installation leaves it."""
    server.put(namespace(platform.platform.cluster.controller_namespace))
    return Cluster(cluster.client, platform.platform.namespace)


def namespace(name: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def definition(name: str, *fields: str) -> dict[str, object]:
    properties: dict[str, Any] = {"spec": {"properties": {field: {} for field in fields}}}
    version = {"name": "v1", "storage": True, "schema": {"openAPIV3Schema": {"properties": properties}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": {"versions": [version]},
    }


def argo_definitions(server: KubernetesServer, *cron_fields: str) -> None:
    for name in ("workflows", "workflowtemplates"):
        server.put(definition(f"{name}.argoproj.io", "entrypoint"))
    server.put(definition("cronworkflows.argoproj.io", *cron_fields))


def test_everything_is_applied_once_and_again_changes_nothing(server, there, platform):
    first = install(there, platform, dry_run=False, force=False)
    assert {each.state for each in first} == {"created"}
    assert server.find("WorkflowTemplate", NAME, there.namespace)
    assert first[0].kind == "Namespace"
    second = install(there, platform, dry_run=False, force=False)
    assert {each.state for each in second} == {"unchanged"}
    assert server.mistakes == []


def test_a_dry_run_changes_nothing(server, there, platform):
    before = server.objects.version
    found = install(there, platform, dry_run=True, force=False)
    assert {each.state for each in found} == {"would be created"}
    assert server.objects.version == before


def test_a_field_that_somebody_else_changed_is_named_and_force_takes_it(server, there, platform):
    install(there, platform, dry_run=False, force=False)
    template = server.find("WorkflowTemplate", NAME, there.namespace)
    template["spec"]["onExit"] = "other"
    server.put(template, manager="kubectl-edit")
    with pytest.raises(Conflict, match=r"WorkflowTemplate slipway: .*kubectl-edit.*\.spec\.onExit") as conflict:
        install(there, platform, dry_run=False, force=False)
    assert "--force" in conflict.value.hint
    states = {each.kind: each.state for each in install(there, platform, dry_run=False, force=True)}
    assert states["WorkflowTemplate"] == "changed"
    assert server.find("WorkflowTemplate", NAME, there.namespace)["spec"]["onExit"] != "other"


def test_without_argo_nothing_is_applied(server, there, platform):
    before = server.objects.version
    server.unregister("argoproj.io/v1alpha1", "workflowtemplates")
    with pytest.raises(NotInstalled, match="has no kind WorkflowTemplate") as missing:
        install(there, platform, dry_run=False, force=False)
    assert "Argo Workflows 4" in missing.value.hint
    assert server.objects.version == before


def test_a_forbidden_object_is_reported(server, there, platform):
    server.forbidden.add(("patch", "workflowtemplates"))
    with pytest.raises(AccessDenied, match="cannot patch resource"):
        install(there, platform, dry_run=False, force=False)


def checks(cluster: Cluster, platform) -> dict[str, tuple[str, str, str]]:
    return {each.what: (each.state, each.found, each.hint) for each in check_cluster(cluster, platform)}


def test_a_bare_cluster_lacks_argo_the_volume_and_the_template(there, platform):
    found = checks(there, platform)
    assert found["Kubernetes"][0] == "ok"
    assert found["Argo Workflows"][0] == found["volume"][0] == found["template"][0] == "missing"
    assert "Argo Workflows 4" in found["Argo Workflows"][2]
    assert found["template"][2] == f"slipway install --platform {PLATFORM}"
    assert found["KServe"][0] == "warning"


def test_an_installed_cluster_has_everything(server, there, platform):
    argo_definitions(server, "schedules")
    install(there, platform, dry_run=False, force=False)
    claim = platform.platform.claim
    server.set_status("PersistentVolumeClaim", there.namespace, claim, {"phase": "Bound"})
    server.put(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "node-1"},
            "status": {"allocatable": {"nvidia.com/gpu": "4"}},
        }
    )
    server.put(namespace("kserve"))
    server.put(definition("inferenceservices.serving.kserve.io", "canary", "predictor"))
    settings = {"deploy": '{"defaultDeploymentMode": "Standard"}', "ingress": '{"enableGatewayApi": true}'}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap"}
    server.put(config_map | {"metadata": {"name": "inferenceservice-config", "namespace": "kserve"}, "data": settings})
    found = checks(there, platform)
    assert {state for state, _, _ in found.values()} == {"ok"}, found
    assert found["GPUs"][1] == "4 on 1 of 1 nodes"
    assert found["KServe"][1] == "Standard mode, 0.20 or newer"
    server.put(
        config_map
        | {"metadata": {"name": "inferenceservice-config", "namespace": "kserve"}, "data": settings | {"ingress": "{}"}}
    )
    assert "enableGatewayApi" in checks(there, platform)["KServe"][2]


def test_an_old_argo_a_changed_template_and_a_missing_right_are_reported(server, there, platform):
    argo_definitions(server, "schedule")
    install(there, platform, dry_run=False, force=False)
    template = server.find("WorkflowTemplate", NAME, there.namespace)
    template["spec"]["entrypoint"] = "other"
    server.put(template)
    server.forbidden |= {("create", "workflows"), ("list", "nodes"), ("get", "pods/log")}
    found = checks(there, platform)
    assert found["Argo Workflows"][1] == "older than 4.0"
    assert found["template"][:2] == ("warning", "not what would be installed now: spec.entrypoint")
    assert found["rights: workflows"][:2] == ("missing", "no create")
    assert found["rights: pods/log"][:2] == ("missing", "no get")
    assert found["GPUs"][0] == "warning"
    assert "may not be seen" in found["GPUs"][1]


def test_a_cache_without_its_label_is_reported(there, platform):
    install(there, platform, dry_run=False, force=False)
    controllers = platform.platform.cluster.controller_namespace
    label = {"workflows.argoproj.io/configmap-type": None}
    there.merge(CONFIG_MAPS, RESOLVE_CACHE, {"metadata": {"labels": label}}, controllers)
    assert "lacks its label" in checks(there, platform)["memoization"][1]


def test_the_command_line_installs_and_checks(server, there, slipway):
    dry = slipway("install", "--platform", PLATFORM, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    assert {each["state"] for each in json.loads(dry.stdout)} == {"would be created"}
    done = slipway("install", "--platform", PLATFORM)
    assert done.returncode == 0, done.stderr
    assert "WorkflowTemplate" in done.stdout
    found = slipway("doctor", "--engine", "argo", "--platform", PLATFORM, "--json")
    assert found.returncode == 1
    states = {each["what"]: each["state"] for each in json.loads(found.stdout)}
    assert states["template"] == "ok"
    assert states["Argo Workflows"] == "missing"
