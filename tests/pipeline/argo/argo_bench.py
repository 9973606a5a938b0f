"""How the tests of the Argo engine reach their cluster, and what they see."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.runs.state import Node, RunState
from stages.parts.cluster.api import Cluster
from tests.kubernetes import KubernetesServer


def connected(server: KubernetesServer, tmp_path: Path, *, patience_s: float, token: str | None = None) -> Cluster:
    from kubernetes import client, config

    settings = client.Configuration()
    config.load_kube_config(str(server.kubeconfig(tmp_path / "kubeconfig", token=token)), client_configuration=settings)
    return Cluster(client.ApiClient(settings), patience_s=patience_s)


def environment_of(server: KubernetesServer, tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "KUBECONFIG": str(server.kubeconfig(tmp_path / "kubeconfig", namespace="elsewhere")),
        "SLIPWAY_PLATFORM": str(tmp_path / "test.yaml"),
        "SLIPWAY_STORE": str(tmp_path / "store"),
        "ARGO_UI": "https://argo.example",
    }


class Seen:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.nodes: list[tuple[str, str, str]] = []
        self.runs: list[tuple[str, str]] = []
        self.last: RunState | None = None

    def run_changed(self, run: RunState) -> None:
        self.runs.append((run.phase, run.message))

    def node_changed(self, run: RunState, node: Node) -> None:
        self.nodes.append((node.name, "Cached" if node.cached else node.phase, node.message))

    def finished(self, run: RunState) -> None:
        self.last = run

    def of(self, task: str) -> list[tuple[str, str]]:
        return [(phase, message) for name, phase, message in self.nodes if name == task]
