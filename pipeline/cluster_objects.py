"""The Kubernetes objects that are made from a platform's settings, as plain data."""

from __future__ import annotations

from typing import Any, Final

from pipeline.platform import ClusterSettings, Platform
from pipeline.pods import GPU_PODS, LOCKS
from pipeline.stage_templates import RESOLVE_CACHE

LABELS: Final = {"app.kubernetes.io/part-of": "slipway"}
CONTROLLER_ACCOUNT: Final = "argo"
"""The service account of Argo's workflow controller, as Argo's own manifests name it."""
RBAC: Final = "rbac.authorization.k8s.io"
API_PORTS: Final = (443, 6443)
PODS: Final = 100

Document = dict[str, Any]


def of(platform: Platform, cluster: ClusterSettings) -> list[Document]:
    namespace = platform.namespace
    return [
        claim(platform, cluster),
        _object("v1", "ConfigMap", LOCKS, namespace, data={GPU_PODS: str(cluster.gpu_pods)}),
        quota(namespace, cluster),
        api_server_policy(namespace, cluster),
        *resolve_cache(cluster.controller_namespace),
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
    return _object("v1", "PersistentVolumeClaim", platform.claim, platform.namespace, spec=spec)


def quota(namespace: str, cluster: ClusterSettings) -> Document:
    hard = {"pods": str(PODS), "requests.nvidia.com/gpu": str(cluster.gpu_quota)}
    return _object("v1", "ResourceQuota", "slipway", namespace, spec={"hard": hard})


def api_server_policy(namespace: str, cluster: ClusterSettings) -> Document:
    """Let Argo's container in each pod report to the API server, and the serve step change objects there."""
    spec = {
        "podSelector": {
            "matchLabels": LABELS,
            "matchExpressions": [{"key": "app.kubernetes.io/component", "operator": "Exists"}],
        },
        "policyTypes": ["Egress"],
        "egress": [
            {
                "to": [{"ipBlock": {"cidr": cidr}} for cidr in cluster.api_server],
                "ports": [{"port": port, "protocol": "TCP"} for port in API_PORTS],
            }
        ],
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", "pods-report-to-the-api-server", namespace, spec=spec)


def resolve_cache(namespace: str) -> list[Document]:
    """The ConfigMap in which Argo's controller keeps memoized results, and its rights on it, in its own namespace."""
    name = RESOLVE_CACHE
    rules = [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get", "update"]},
    ]
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    subjects = [{"kind": "ServiceAccount", "name": CONTROLLER_ACCOUNT, "namespace": namespace}]
    cache = _object("v1", "ConfigMap", name, namespace)
    cache["metadata"]["labels"]["workflows.argoproj.io/configmap-type"] = "Cache"
    return [
        cache,
        _object(f"{RBAC}/v1", "Role", name, namespace, rules=rules),
        _object(f"{RBAC}/v1", "RoleBinding", name, namespace, roleRef=role, subjects=subjects),
    ]


def _object(api_version: str, kind: str, name: str, namespace: str, **fields: Any) -> Document:
    metadata = {"name": name, "namespace": namespace, "labels": dict(LABELS)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}
