"""Finds Argo's workflow controller, which its own manifests, Helm and operators name differently."""

from __future__ import annotations

import contextlib
import re
from typing import Final

from pipeline.local.manifest import seconds
from stages.parts.base.errors import AccessDenied
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CONFIG_MAPS, DEPLOYMENTS, Object

CONTROLLER: Final = "workflow-controller"
REQUEUE: Final = "DEFAULT_REQUEUE_TIME"
DEFAULT_KEY: Final = "workflows.argoproj.io/default-artifact-repository"
REPOSITORY: Final = re.compile(r"^artifactRepository:((?:\n[ \t]+.*|\n[ \t]*)*)", re.MULTILINE)
"""The part of the controller's configuration, where that is one text."""
INSECURE: Final = re.compile(r"^metricsConfig:(?:\n[ \t]+.*)*?\n[ \t]+secure:[ \t]*false", re.MULTILINE)
STORAGE: Final = re.compile(r"^\s*(?:s3|gcs|azure|oss|hdfs|artifactory|plugin):", re.MULTILINE)


def controllers(cluster: Cluster, namespace: str) -> list[Object]:
    """List the controller's Deployments in *namespace*, those that are ready first."""
    return sorted(filter(_is_controller, cluster.list(DEPLOYMENTS, namespace)[0]), key=ready, reverse=True)


def _is_controller(deployment: Object) -> bool:
    pod = deployment["spec"]["template"]
    labels = [place.get("labels") or {} for place in (deployment["metadata"], pod.get("metadata", {}))]
    # Helm's chart marks it by the first of these labels, Argo's own manifests by the second.
    if any(label.get(key) == CONTROLLER for label in labels for key in ("app.kubernetes.io/component", "app")):
        return True
    return any(f"/{CONTROLLER}" in f"/{container['image']}" for container in pod["spec"]["containers"])


def ready(deployment: Object) -> bool:
    return bool(deployment.get("status", {}).get("readyReplicas"))


def tag(deployment: Object) -> str:
    """Return the tag of its image, which is its version if that is a release."""
    images = [container["image"] for container in deployment["spec"]["template"]["spec"]["containers"]]
    image = next((image for image in images if CONTROLLER in image), images[0])
    return str(image).rpartition("/")[2].partition("@")[0].partition(":")[2] or "of unknown version"


def notices_s(deployment: Object) -> float:
    """Return how many seconds may pass until the controller notices that a pod has ended and begins the next step."""
    containers = deployment["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable for container in containers for variable in container.get("env", [])}
    with contextlib.suppress(ValueError):
        return seconds(str(variables.get(REQUEUE, {}).get("value", "")))
    return 10.0


def account(cluster: Cluster, namespace: str) -> str | None:
    """Return the service account of the controller in *namespace*, or None if no controller is ready."""
    pods = (
        controller["spec"]["template"]["spec"] for controller in controllers(cluster, namespace) if ready(controller)
    )
    return next((str(pod.get("serviceAccountName", "default")) for pod in pods), None)


def has_repository(cluster: Cluster, controller_namespace: str) -> bool:
    """Return whether runs in the cluster's namespace have a default artifact repository, looked for where Argo does: in
    the namespace itself, then in its controller's configuration. If neither may be read, they count as without."""
    repositories = _config_map(cluster, "artifact-repositories", cluster.namespace)
    if repositories.get("metadata", {}).get("annotations", {}).get(DEFAULT_KEY) in repositories.get("data", {}):
        return True
    configuration = _config_map(cluster, f"{CONTROLLER}-configmap", controller_namespace).get("data", {})
    texts = (configuration.get("artifactRepository", ""), *REPOSITORY.findall(configuration.get("config", "")))
    return any(STORAGE.search(text) for text in texts)


def metrics_scheme(cluster: Cluster, namespace: str) -> str:
    """Return how the controller in *namespace* tells its metrics: https, unless its configuration says otherwise."""
    configuration = _config_map(cluster, f"{CONTROLLER}-configmap", namespace).get("data", {})
    own = "\n  ".join(("metricsConfig:", *configuration.get("metricsConfig", "").splitlines()))
    texts = (own, configuration.get("config", ""))
    return "http" if any(INSECURE.search(text) for text in texts) else "https"


def _config_map(cluster: Cluster, name: str, namespace: str) -> Object:
    with contextlib.suppress(AccessDenied):
        return cluster.find(CONFIG_MAPS, name, namespace) or {}
    return {}
