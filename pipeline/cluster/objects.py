"""The Kubernetes objects that are made from a platform's settings, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pipeline.settings.platform import LOCKS, ClusterSettings, Platform
from pipeline.workflow.parameters import RESOLVE_CACHE
from pipeline.workflow.pods import GPU_PODS
from stages.parts.cluster.kinds import Object
from stages.rollout.kserve.objects import PART_OF

CONTROLLER_ACCOUNT: Final = "argo"
"""The service account of Argo's workflow controller, as Argo's own manifests name it."""
RBAC: Final = "rbac.authorization.k8s.io"


def of(platform: Platform, cluster: ClusterSettings) -> list[Object]:
    """Make the volume's claim, the limits, the network policies and the memo of a platform."""
    namespace, storage = platform.namespace, cluster.storage
    claim: Object = {"accessModes": [storage.access], "resources": {"requests": {"storage": storage.size}}}
    if storage.storage_class:  # otherwise the cluster's default one applies
        claim["storageClassName"] = storage.storage_class
    hard = {"pods": "100", "requests.nvidia.com/gpu": str(cluster.gpu_quota)}
    # Argo's container in each pod reports to the API server, and the serve step changes objects there.
    api_server = [{"cidr": cidr} for cidr in cluster.api_server]
    # Models and the data sets of quality tasks come from the Hub, but nothing from the cloud's metadata server.
    hub: Object = {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}
    asking = {"operator": "In", "values": ["resolve", "acquire", "check", "evaluate"]}
    return [
        labelled("v1", "PersistentVolumeClaim", platform.claim, namespace, spec=claim),
        labelled("v1", "ConfigMap", LOCKS, namespace, data={GPU_PODS: str(cluster.gpu_pods)}),
        labelled("v1", "ResourceQuota", "slipway", namespace, spec={"hard": hard}),
        _egress("pods-report-to-the-api-server", namespace, {"operator": "Exists"}, api_server, (443, 6443)),
        _egress("stages-reach-the-hub", namespace, asking, [hub], cluster.hub_ports),
        *resolve_cache(cluster.controller_namespace, cluster.controller_account or CONTROLLER_ACCOUNT),
    ]


def _egress(name: str, namespace: str, stages: Object, blocks: list[Object], ports: Iterable[int]) -> Object:
    component = {"key": "app.kubernetes.io/component"} | stages
    allowed = [{"port": port, "protocol": "TCP"} for port in ports]
    spec = {
        "podSelector": {"matchLabels": PART_OF, "matchExpressions": [component]},
        "policyTypes": ["Egress"],
        "egress": [{"to": [{"ipBlock": block} for block in blocks], "ports": allowed}],
    }
    return labelled("networking.k8s.io/v1", "NetworkPolicy", name, namespace, spec=spec)


def resolve_cache(namespace: str, account: str) -> list[Object]:
    """Make the ConfigMap in which Argo's controller keeps memoized results, and its rights to it, in its namespace."""
    name = RESOLVE_CACHE
    rule = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get", "update"]}
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    cache = labelled("v1", "ConfigMap", name, namespace)
    # Argo replaces all labels each time it writes, so that ours stand as annotations.
    cache["metadata"] |= {"labels": {"workflows.argoproj.io/configmap-type": "Cache"}, "annotations": dict(PART_OF)}
    return [
        cache,
        labelled(f"{RBAC}/v1", "Role", name, namespace, rules=[rule]),
        labelled(f"{RBAC}/v1", "RoleBinding", name, namespace, roleRef=role, subjects=[subject]),
    ]


def labelled(api_version: str, kind: str, name: str, namespace: str, **fields: Any) -> Object:
    """Make an object that has the label by which Slipway finds what is its own."""
    metadata = {"name": name, "namespace": namespace, "labels": dict(PART_OF)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}
