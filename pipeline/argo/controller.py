"""Finds Argo's workflow controller, which its own manifests, Helm and operators name differently."""

from __future__ import annotations

from typing import Final

from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import DEPLOYMENTS, Object

CONTROLLER: Final = "workflow-controller"
LABELS: Final = ("app.kubernetes.io/component", "app")
"""The labels by which Helm's chart and Argo's own manifests mark the controller."""


def controllers(cluster: Cluster, namespace: str) -> list[Object]:
    """The controller's Deployments in *namespace*, those that are ready first.

    Raises:
        AccessDenied: they may not be read.
    """
    found = [each for each in cluster.list(DEPLOYMENTS, namespace)[0] if _is_controller(each)]
    return sorted(found, key=lambda each: not ready(each))


def ready(deployment: Object) -> bool:
    return bool(deployment.get("status", {}).get("readyReplicas"))


def tag(deployment: Object) -> str:
    """The tag of its image, which of a release is its version."""
    images = [each["image"] for each in deployment["spec"]["template"]["spec"]["containers"]]
    chosen = next((each for each in images if CONTROLLER in each), images[0])
    return str(chosen).rpartition("/")[2].partition("@")[0].partition(":")[2] or "of unknown version"


def account(cluster: Cluster, namespace: str) -> str | None:
    """The service account of the controller in *namespace*. None if there is no controller that is ready.

    Raises:
        AccessDenied: Deployments may not be read there.
    """
    found = [each for each in controllers(cluster, namespace) if ready(each)]
    return found[0]["spec"]["template"]["spec"].get("serviceAccountName", "default") if found else None


def _is_controller(deployment: Object) -> bool:
    pod = deployment["spec"]["template"]
    labels = [each.get("labels") or {} for each in (deployment["metadata"], pod.get("metadata", {}))]
    if any(each.get(key) == CONTROLLER for each in labels for key in LABELS):
        return True
    return any(f"/{CONTROLLER}" in f"/{each['image']}" for each in pod["spec"]["containers"])
