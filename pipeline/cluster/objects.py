"""The Kubernetes objects that are made from a platform's settings, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pipeline.settings.platform import LOCKS, ClusterSettings, Platform
from pipeline.workflow.parameters import RESOLVE_CACHE
from pipeline.workflow.pods import GPU_PODS

LABELS: Final = {"app.kubernetes.io/part-of": "slipway"}
CONTROLLER_ACCOUNT: Final = "argo"
"""The service account of Argo's workflow controller, as Argo's own manifests name it."""
RBAC: Final = "rbac.authorization.k8s.io"
API_PORTS: Final = (443, 6443)
ASK_THE_HUB: Final = ("resolve", "acquire", "check", "evaluate")
PODS: Final = 100

Document = dict[str, Any]


def of(platform: Platform, cluster: ClusterSettings) -> list[Document]:
    namespace = platform.namespace
    return [
        claim(platform, cluster),
        made("v1", "ConfigMap", LOCKS, namespace, data={GPU_PODS: str(cluster.gpu_pods)}),
        quota(namespace, cluster),
        api_server_policy(namespace, cluster),
        hub_policy(namespace, cluster),
        *resolve_cache(cluster.controller_namespace, cluster.controller_account or CONTROLLER_ACCOUNT),
    ]


def claim(platform: Platform, cluster: ClusterSettings) -> Document:
    """The claim for the store's volume. Without a storage class, the cluster's default one applies."""
    storage = cluster.storage
    spec: Document = {
        "accessModes": [storage.access],
        "resources": {"requests": {"storage": storage.size}},
    }
    if storage.storage_class:
        spec["storageClassName"] = storage.storage_class
    return made("v1", "PersistentVolumeClaim", platform.claim, platform.namespace, spec=spec)


def quota(namespace: str, cluster: ClusterSettings) -> Document:
    hard = {"pods": str(PODS), "requests.nvidia.com/gpu": str(cluster.gpu_quota)}
    return made("v1", "ResourceQuota", "slipway", namespace, spec={"hard": hard})


def api_server_policy(namespace: str, cluster: ClusterSettings) -> Document:
    """Let Argo's container in each pod report to the API server, and the serve step change objects there."""
    blocks = [{"cidr": cidr} for cidr in cluster.api_server]
    return _egress("pods-report-to-the-api-server", namespace, {"operator": "Exists"}, blocks, API_PORTS)


def hub_policy(namespace: str, cluster: ClusterSettings) -> Document:
    """Let stages reach the Hub, for models and the data sets of quality tasks, but not the cloud's metadata server."""
    stages = {"operator": "In", "values": list(ASK_THE_HUB)}
    blocks: list[Document] = [{"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}]
    return _egress("stages-reach-the-hub", namespace, stages, blocks, cluster.hub_ports)


def _egress(name: str, namespace: str, stages: Document, blocks: list[Document], ports: Iterable[int]) -> Document:
    spec = {
        "podSelector": {
            "matchLabels": LABELS,
            "matchExpressions": [{"key": "app.kubernetes.io/component"} | stages],
        },
        "policyTypes": ["Egress"],
        "egress": [
            {
                "to": [{"ipBlock": block} for block in blocks],
                "ports": [{"port": port, "protocol": "TCP"} for port in ports],
            }
        ],
    }
    return made("networking.k8s.io/v1", "NetworkPolicy", name, namespace, spec=spec)


def resolve_cache(namespace: str, account: str) -> list[Document]:
    """The ConfigMap in which Argo's controller keeps memoized results, and its rights on it, in its own namespace."""
    name = RESOLVE_CACHE
    rules = [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get", "update"]},
    ]
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    subjects = [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]
    cache = made("v1", "ConfigMap", name, namespace)
    # Argo replaces all labels each time it writes, so that ours stand as annotations.
    cache["metadata"] |= {"labels": {"workflows.argoproj.io/configmap-type": "Cache"}, "annotations": dict(LABELS)}
    return [
        cache,
        made(f"{RBAC}/v1", "Role", name, namespace, rules=rules),
        made(f"{RBAC}/v1", "RoleBinding", name, namespace, roleRef=role, subjects=subjects),
    ]


def made(api_version: str, kind: str, name: str, namespace: str, **fields: Any) -> Document:
    metadata = {"name": name, "namespace": namespace, "labels": dict(LABELS)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}
