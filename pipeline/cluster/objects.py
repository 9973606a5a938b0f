"""The Kubernetes objects that are made from a platform's settings, as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pipeline.settings.platform import LOCKS, ClusterSettings, Platform
from pipeline.workflow.parameters import RESOLVE_CACHE
from pipeline.workflow.pods import GPU_PODS
from stages.parts.base.templates import rendered
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Object
from stages.rollout.kserve.objects import PART_OF

CONTROLLER_ACCOUNT: Final = "argo"
"""The service account of Argo's workflow controller, as Argo's own manifests name it."""
TEMPLATE: Final = Path(__file__).with_name("platform.yaml.jinja")


def of(platform: Platform, cluster: ClusterSettings) -> list[Object]:
    """Make the volume's claim, the limits, the network policies and the memo of a platform."""
    account = cluster.controller_account or CONTROLLER_ACCOUNT
    names = {"locks": LOCKS, "gpu_pods": GPU_PODS, "memo": RESOLVE_CACHE, "account": account}
    return rendered(TEMPLATE, platform=platform, cluster=cluster, **names)


def find(cluster: Cluster, body: Object) -> tuple[str, Object | None]:
    """Return an object's title, such as ``ConfigMap slipway/slipway-locks``, and what the cluster has under its name.
    Raises: NotInstalled: it has no such kind."""
    name, namespace = body["metadata"]["name"], body["metadata"]["namespace"]
    kind = cluster.kind(body["apiVersion"], body["kind"])
    return f"{kind.name} {namespace}/{name}", cluster.find(kind, name, namespace)


def labelled(kind: str, name: str, namespace: str, **fields: Any) -> Object:
    """Make an object of the core API that has the label by which Slipway finds what is its own."""
    metadata = {"name": name, "namespace": namespace, "labels": dict(PART_OF)}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **fields}
