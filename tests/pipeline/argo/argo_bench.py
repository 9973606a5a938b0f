"""How the tests of the Argo engine reach their cluster, and what they see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from pipeline.runs.state import RunState
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.login import by_kubeconfig
from tests.kubernetes import KubernetesServer

PLATFORM: Final = "kind"
"""The platform that is installed, and that the tests' own is made from."""


def connected(server: KubernetesServer, tmp_path: Path, *, patience_s: float, token: str | None = None) -> Cluster:
    login, _ = by_kubeconfig([server.kubeconfig(tmp_path / "kubeconfig", token=token)], None)
    return Cluster(login, patience_s=patience_s)


def environment_of(server: KubernetesServer, tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "KUBECONFIG": str(server.kubeconfig(tmp_path / "kubeconfig", namespace="elsewhere")),
        "SLIPWAY_PLATFORM": str(tmp_path / "test.yaml"),
        "SLIPWAY_STORE": str(tmp_path / "store"),
        "ARGO_UI": "https://argo.example",
        "HF_HUB_OFFLINE": "1",
    }


class Seen:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.nodes: list[tuple[str, str, str]] = []
        self.runs: list[tuple[str, str]] = []
        self.last: RunState | None = None

    def changed(self, run: RunState) -> None:
        self.runs.append((run.phase, run.message))
        self.nodes += [(node.name, "Cached" if node.cached else node.phase, node.message) for node in run.nodes]

    def finished(self, run: RunState) -> None:
        self.changed(run)
        self.last = run

    def of(self, task: str) -> list[tuple[str, str]]:
        return [(phase, message) for name, phase, message in self.nodes if name == task]


def namespace(name: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def definition(name: str, *fields: str) -> dict[str, object]:
    properties: dict[str, Any] = {"spec": {"properties": {field: {} for field in fields}}}
    version = {"name": "v1beta1", "storage": True, "schema": {"openAPIV3Schema": {"properties": properties}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": {"versions": [version]},
    }


def controller(
    image: str, ready: int = 1, account: str = "argo", labels: dict[str, str] | None = None
) -> dict[str, Any]:
    spec = {"serviceAccountName": account, "containers": [{"name": "controller", "image": image}]}
    pod = {"metadata": {"labels": labels or {}}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "argo-workflow-controller", "namespace": "argo"},
        "spec": {"selector": {}, "template": pod},
        "status": {"readyReplicas": ready},
    }


def with_kserve(
    server: KubernetesServer, ingress: str = '{"enableGatewayApi": true}', version: str = "v0.21.0"
) -> None:
    server.put(namespace("kserve"))
    server.put(definition("inferenceservices.serving.kserve.io", "canary", "predictor"))
    place = {"namespace": "kserve"}
    data = {"deploy": '{"defaultDeploymentMode": "Standard"}', "ingress": ingress}
    metadata = place | {"name": "inferenceservice-config"}
    server.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    running = controller(f"kserve/kserve-controller:{version}")
    running["metadata"] = place | {"name": "kserve-controller-manager"}
    running["spec"]["template"]["spec"]["containers"][0]["name"] = "manager"
    server.put(running)
