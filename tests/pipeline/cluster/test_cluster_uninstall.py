"""Removing from a cluster what was installed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.cluster.install import install, uninstall
from pipeline.workflow.parameters import NAME, RESOLVE_CACHE
from stages.parts.base.errors import AccessDenied, Conflict
from stages.parts.cluster.api import Cluster
from stages.rollout.kserve.shared_address import KINDS, SHARED
from tests.kubernetes import KubernetesServer
from tests.pipeline.argo.argo_bench import PLATFORM, namespace, with_kserve


@pytest.fixture
def there(server: KubernetesServer, there: Cluster, platform) -> Cluster:
    """A cluster with KServe on which everything is installed."""
    with_kserve(server)
    install(there, platform, dry_run=False, force=False)
    return there


def removed(there: Cluster, platform, **options: bool) -> dict[str, tuple[str, str]]:
    options = {"models": False, "dry_run": False, "force": False} | options
    done = uninstall(there, platform, **options)
    return {f"{each.kind} {each.namespace}/{each.name}": (each.state, each.reason) for each in done}


def workflow(there: Cluster, phase: str) -> dict[str, object]:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": "slipway-1", "namespace": there.namespace, "labels": {"app.kubernetes.io/part-of": NAME}},
        "spec": {"workflowTemplateRef": {"name": NAME}},
        "status": {"phase": phase},
    }


def config_map(there: Cluster, name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": there.namespace}}


def test_what_was_installed_goes_but_the_models_and_their_namespace(server, there, platform):
    server.put(workflow(there, "Succeeded"))
    first = removed(there, platform)
    kept = {what: reason for what, (state, reason) in first.items() if state == "kept"}
    assert kept.keys() == {"PersistentVolumeClaim slipway/slipway-models", "Namespace /slipway"}
    assert all("--models" in reason for reason in kept.values())
    assert {state for state, _ in first.values()} == {"removed", "kept"}
    assert list(first)[-1] == "Namespace /slipway"
    assert [server.all(kind) for kind in ("PriorityClass", "WorkflowTemplate", "ServingRuntime", "Role")] == [[]] * 4
    assert RESOLVE_CACHE not in {each["metadata"]["name"] for each in server.all("ConfigMap", "argo")}
    assert {state for state, _ in removed(there, platform).values()} == {"absent", "kept"}
    assert server.mistakes == []


def test_with_the_models_the_namespace_goes_too(server, there, platform):
    server.put(config_map(there, "slipway-hub") | {"kind": "Secret"})
    owned = config_map(there, "of-a-run")
    owned["metadata"] |= {"ownerReferences": [{"kind": "Workflow", "name": "slipway-1"}]}
    server.put(owned)
    assert removed(there, platform, models=True, dry_run=True)["Namespace /slipway"][0] == "would be removed"
    assert {state for state, _ in removed(there, platform, models=True).values()} == {"removed"}
    assert there.namespace not in {each["metadata"]["name"] for each in server.all("Namespace")}


def test_a_namespace_that_holds_what_is_not_ours_stays(server, there, platform):
    server.put(config_map(there, "somebody-elses"))
    found = removed(there, platform, models=True)
    assert found["Namespace /slipway"] == ("kept", "it also holds ConfigMap somebody-elses")
    assert found["PersistentVolumeClaim slipway/slipway-models"][0] == "removed"
    assert server.find("ConfigMap", "somebody-elses", there.namespace)


def test_the_memo_stays_unchanged_and_ours_once_argo_has_written_into_it(server, there, platform):
    memo = server.find("ConfigMap", RESOLVE_CACHE, "argo")
    memo["metadata"]["labels"] = {"workflows.argoproj.io/configmap-type": "Cache"}  # Argo replaces all labels
    server.put(memo | {"data": {"key": "{}"}}, manager="workflow-controller")
    again = install(there, platform, dry_run=False, force=False)
    assert {each.state for each in again} == {"unchanged"}
    assert server.find("ConfigMap", RESOLVE_CACHE, "argo")["data"] == {"key": "{}"}
    assert removed(there, platform)[f"ConfigMap argo/{RESOLVE_CACHE}"][0] == "removed"


def test_an_object_that_is_not_ours_stays(server, there, platform):
    server.remove("LimitRange", "slipway", there.namespace)
    server.put(config_map(there, "slipway") | {"kind": "LimitRange"})
    assert removed(there, platform)["LimitRange slipway/slipway"][0] == "kept"


def test_what_another_installation_needs_stays(server, there, platform):
    server.put(namespace("team-b"))
    template = server.find("WorkflowTemplate", NAME, there.namespace)
    server.put(
        {**template, "metadata": {"name": NAME, "namespace": "team-b", "labels": template["metadata"]["labels"]}}
    )
    found = removed(there, platform)
    for each in ("PriorityClass /slipway-pipeline", f"ConfigMap argo/{RESOLVE_CACHE}"):
        assert found[each] == ("kept", "Slipway in namespace team-b needs it")
    assert found["WorkflowTemplate slipway/slipway"][0] == "removed"
    assert found["Role kserve/slipway-serve"][0] == "kept"
    assert found["RoleBinding kserve/slipway-serve-slipway"][0] == "removed"


def test_nothing_goes_while_runs_are_active_or_endpoints_serve(server, there, platform):
    server.put(workflow(there, "Running"))
    before = server.objects.version
    with pytest.raises(Conflict, match="runs are active in namespace slipway: slipway-1") as active:
        removed(there, platform)
    assert "slipway stop slipway-1" in active.value.hint
    assert server.objects.version == before
    server.remove("Workflow", "slipway-1", there.namespace)
    served = {"name": "org--name", "namespace": there.namespace, "labels": {"app.kubernetes.io/part-of": NAME}}
    server.put({"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": served, "spec": {}})
    with pytest.raises(Conflict, match="endpoints serve in namespace slipway: org--name"):
        removed(there, platform)
    server.remove("InferenceService", "org--name", there.namespace)
    server.put({"apiVersion": "serving.kserve.io/v1alpha1", "kind": "LLMInferenceService", "metadata": served})
    with pytest.raises(Conflict, match="endpoints serve in namespace slipway: org--name") as serving:
        removed(there, platform)
    assert "delete llminferenceservices,httproutes -l" in serving.value.hint
    assert "slipway/shared-address" not in serving.value.hint
    joined = {"name": "org--name-shared", "namespace": there.namespace, "labels": SHARED}
    for kind in KINDS[1:3]:
        server.put({"apiVersion": kind.api_version, "kind": kind.name, "metadata": joined, "spec": {}})
    with pytest.raises(Conflict) as shared:
        removed(there, platform)
    assert "delete aigatewayroutes,aiservicebackends -l slipway/shared-address=true, or --force" in shared.value.hint
    assert removed(there, platform, force=True)["WorkflowTemplate slipway/slipway"][0] == "removed"


def test_without_argo_and_kserve_the_rest_is_removed(server, there, platform):
    for kind in ("workflows", "workflowtemplates", "cronworkflows"):
        server.unregister("argoproj.io/v1alpha1", kind)
    server.unregister("serving.kserve.io/v1beta1", "inferenceservices")
    server.unregister("serving.kserve.io/v1alpha1", "servingruntimes")
    found = removed(Cluster(there.login, there.namespace), platform)
    assert found["WorkflowTemplate slipway/slipway"][0] == "absent"
    assert found["ServiceAccount slipway/slipway-stages"][0] == "removed"


def test_without_the_right_to_see_other_namespaces_nothing_goes(server, there, platform):
    server.forbidden.add(("list", "workflowtemplates"))
    before = server.objects.version
    with pytest.raises(AccessDenied):
        removed(there, platform)
    assert server.objects.version == before


def test_the_command_asks_and_prints_what_went(server, there, slipway):
    before = server.objects.version
    refused = slipway("uninstall", "--platform", PLATFORM)
    assert refused.returncode == 2
    assert "hint: --yes" in refused.stderr
    dry = slipway("uninstall", "--platform", PLATFORM, "--dry-run", "--json")
    assert {each["state"] for each in json.loads(dry.stdout)} == {"would be removed", "kept"}
    assert server.objects.version == before
    done = slipway("uninstall", "--platform", PLATFORM, "--yes")
    assert done.returncode == 0, done.stderr
    assert "kept: it holds the models; --models removes it" in done.stdout
