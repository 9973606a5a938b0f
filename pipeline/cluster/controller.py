"""Finds Argo's workflow controller, which its own manifests, Helm and operators name differently."""

from __future__ import annotations

import contextlib
from typing import Final

import yaml

from pipeline.local.manifest import seconds
from stages.parts.base.errors import AccessDenied
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CONFIG_MAPS, DEPLOYMENTS, Object

CONTROLLER: Final = "workflow-controller"
REQUEUE: Final = "DEFAULT_REQUEUE_TIME"
DEFAULT_KEY: Final = "workflows.argoproj.io/default-artifact-repository"
STORAGES: Final = frozenset({"s3", "gcs", "azure", "oss", "hdfs", "artifactory", "plugin"})


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
    pods = (each["spec"]["template"]["spec"] for each in controllers(cluster, namespace) if ready(each))
    return next((str(pod.get("serviceAccountName", "default")) for pod in pods), None)


def has_repository(cluster: Cluster, controller_namespace: str) -> bool:
    """Return whether runs in the cluster's namespace have a default artifact repository, looked for where Argo does: in
    the namespace itself, then in its controller's configuration. If neither may be read, they count as without."""
    repositories = _config_map(cluster, "artifact-repositories", cluster.namespace)
    if repositories.get("metadata", {}).get("annotations", {}).get(DEFAULT_KEY) in repositories.get("data", {}):
        return True
    return not STORAGES.isdisjoint(_configuration(cluster, controller_namespace).get("artifactRepository") or {})


def metrics_scheme(cluster: Cluster, namespace: str) -> str:
    """Return how the controller in *namespace* tells its metrics: https, unless its configuration says otherwise."""
    metrics = _configuration(cluster, namespace).get("metricsConfig") or {}
    return "http" if metrics.get("secure") is False else "https"


def _configuration(cluster: Cluster, namespace: str) -> Object:
    """Read the controller's configuration: each field is YAML by itself, and in older versions all together are."""
    data = _config_map(cluster, f"{CONTROLLER}-configmap", namespace).get("data", {})
    with contextlib.suppress(yaml.YAMLError):
        fields = {name: yaml.safe_load(text) for name, text in data.items()}
        return (fields.get("config") or {}) | fields
    return {}


def _config_map(cluster: Cluster, name: str, namespace: str) -> Object:
    with contextlib.suppress(AccessDenied):
        return cluster.find(CONFIG_MAPS, name, namespace) or {}
    return {}
