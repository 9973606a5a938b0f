"""What is said of a pod that finds no node."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.argo.status import Rooms, nodes_of, run_state, templates
from tests.kubernetes import KubernetesServer

FULL = (
    "Unschedulable: 0/2 nodes are available: 2 Insufficient cpu. no new claims to deallocate, preemption: 0/2 nodes "
    "are available: 2 Preemption is not helpful for scheduling."
)
TAINT = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}


def waiting(message: str, **template: Any) -> dict[str, Any]:
    requests = {"requests": {"cpu": "500m", "memory": "2Gi"}, "limits": {"memory": "2Gi"}}
    patch = '{"containers": [{"name": "main", "resources": {"requests": {"memory": "{{inputs.parameters.memory}}"}}}]}'
    stage = {"name": "work", "container": {"image": "one", "resources": requests}, "podSpecPatch": patch} | template
    main = {"name": "main", "dag": {"tasks": [{"name": "evaluate", "template": "work"}]}}
    given = {"parameters": [{"name": "memory", "value": "4Gi"}]}
    pod = {"id": "pod", "name": "run.evaluate(0)", "type": "Pod", "phase": "Pending", "message": message}
    retry = {"id": "task", "name": "run.evaluate", "type": "Retry", "phase": "Running", "children": ["pod"]}
    return {
        "metadata": {"name": "run", "namespace": "default"},
        "spec": {"workflowTemplateRef": {"name": "slipway"}},
        "status": {
            "phase": "Running",
            "storedWorkflowTemplateSpec": {"entrypoint": "main", "templates": [main, stage]},
            "nodes": {each["id"]: each | {"inputs": given, "templateName": "work"} for each in (retry, pod)},
        },
    }


def node(name: str, cpu: str, memory: str, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": more.pop("labels", {})}
    allocatable = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": more.pop("gpus", "0")}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": more}
    return body | {"status": {"allocatable": allocatable}}


def pod(name: str, where: str, cpu: str, phase: str = "Running") -> dict[str, Any]:
    containers = [{"name": "main", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "kube-system"}}
    return body | {"spec": {"nodeName": where, "containers": containers}, "status": {"phase": phase}}


def said(workflow: dict[str, Any], rooms: Rooms | None = None) -> str:
    state = run_state(workflow)
    if rooms:
        rooms.fill(state, templates(workflow), nodes_of(workflow["status"]))
    return state.node("evaluate").message


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (FULL, "waits for room: asks for 0.5 CPU, 4 GiB; no node has it free"),
        (
            "Unschedulable: 0/1 nodes are available: 1 node(s) had untolerated taint {a: b}. preemption: 0/1 nodes are",
            "waits for a node: 1 node(s) had untolerated taint {a: b}",
        ),
        ("ContainerCreating", "ContainerCreating"),
    ],
)
def test_a_pod_without_a_node_says_in_short_what_it_asks_for(message, shown):
    assert said(waiting(message)) == shown


def test_the_nodes_that_match_are_looked_at_for_what_is_left(server: KubernetesServer, cluster):
    server.put(node("small", "2", "8Gi"))
    server.put(node("large", "4", "16Gi"))
    server.put(node("gpu", "64", "500Gi", taints=[TAINT], gpus="8"))
    server.put(node("closed", "64", "500Gi", unschedulable=True))
    for each in (pod("a", "small", "1900m"), pod("b", "large", "3750m"), pod("c", "large", "4", phase="Succeeded")):
        server.put(each)
    found = said(waiting(FULL), Rooms(cluster))
    assert found == (
        "waits for room: asks for 0.5 CPU, 4 GiB; the best of 2 nodes that match has 0.25 CPU, 15 GiB left"
    )
    tolerated = waiting(FULL, nodeSelector={"type": "l4"}, tolerations=[TAINT])
    assert said(tolerated, Rooms(cluster)).endswith("none of 3 nodes has the labels and taints for it")
    server.put(node("l4", "1", "8Gi", labels={"type": "l4"}, taints=[TAINT], gpus="1"))
    assert said(tolerated, Rooms(cluster)).endswith("; the node that matches has 1 CPU, 8 GiB left")


def test_without_the_right_to_read_nodes_one_short_sentence_stays(server: KubernetesServer, cluster):
    server.forbidden.add(("list", "pods"))
    server.put(node("small", "2", "8Gi"))
    rooms = Rooms(cluster)
    for _ in range(2):
        assert said(waiting(FULL), rooms).endswith("; no node has it free")
    assert len(server.requests_for("list", "/api/v1/pods")) == 1
