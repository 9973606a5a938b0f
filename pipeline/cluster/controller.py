"""Finds Argo's workflow controller, which its own manifests, Helm and operators name differently."""

from __future__ import annotations

import contextlib
import re
from typing import Final

from stages.parts.base.errors import AccessDenied
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CONFIG_MAPS, DEPLOYMENTS, Object
from stages.parts.cluster.refusals import Absent

CONTROLLER: Final = "workflow-controller"
REQUEUE: Final = "DEFAULT_REQUEUE_TIME"
REQUEUE_S: Final = 10.0
DURATION: Final = re.compile(r"([\d.]+)(ms|s|m|h)")
SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
CONFIGURATION: Final = "workflow-controller-configmap"
REPOSITORIES: Final = "artifact-repositories"
DEFAULT_KEY: Final = "workflows.argoproj.io/default-artifact-repository"
REPOSITORY: Final = re.compile(r"^artifactRepository:((?:\n[ \t]+.*|\n[ \t]*)*)", re.MULTILINE)
"""The part of the controller's configuration, where that is one text."""
STORAGE: Final = re.compile(r"^\s*(?:s3|gcs|azure|oss|hdfs|artifactory|plugin):", re.MULTILINE)
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
    chosen = next((image for image in images if CONTROLLER in image), images[0])
    return str(chosen).rpartition("/")[2].partition("@")[0].partition(":")[2] or "of unknown version"


def notices_s(deployment: Object) -> float:
    """How many seconds may pass before the controller notices that a pod has ended, and begins the next step."""
    given = [
        each for container in deployment["spec"]["template"]["spec"]["containers"] for each in container.get("env", [])
    ]
    said = next((str(each.get("value", "")) for each in given if each["name"] == REQUEUE), "")
    parts = DURATION.findall(said)
    return sum(float(number) * SECONDS[unit] for number, unit in parts) if parts else REQUEUE_S


def account(cluster: Cluster, namespace: str) -> str | None:
    """The service account of the controller in *namespace*. None if there is no controller that is ready.

    Raises:
        AccessDenied: Deployments may not be read there.
    """
    found = [controller for controller in controllers(cluster, namespace) if ready(controller)]
    return found[0]["spec"]["template"]["spec"].get("serviceAccountName", "default") if found else None


def has_repository(cluster: Cluster, controller_namespace: str) -> bool:
    """Whether runs in the cluster's namespace have a default artifact repository, looked for where Argo does: in the
    namespace itself, then in its controller's configuration. False if neither may be read."""
    own = _config_map(cluster, REPOSITORIES, cluster.namespace)
    if own.get("metadata", {}).get("annotations", {}).get(DEFAULT_KEY) in own.get("data", {}):
        return True
    controllers = _config_map(cluster, CONFIGURATION, controller_namespace).get("data", {})
    texts = (controllers.get("artifactRepository", ""), *REPOSITORY.findall(controllers.get("config", "")))
    return any(STORAGE.search(text) for text in texts)


def _config_map(cluster: Cluster, name: str, namespace: str) -> Object:
    with contextlib.suppress(Absent, AccessDenied):
        return cluster.get(CONFIG_MAPS, name, namespace)
    return {}


def _is_controller(deployment: Object) -> bool:
    pod = deployment["spec"]["template"]
    labels = [each.get("labels") or {} for each in (deployment["metadata"], pod.get("metadata", {}))]
    if any(label.get(key) == CONTROLLER for label in labels for key in LABELS):
        return True
    return any(f"/{CONTROLLER}" in f"/{each['image']}" for each in pod["spec"]["containers"])
