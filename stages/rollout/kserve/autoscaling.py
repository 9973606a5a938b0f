"""KEDA's part: replicas of one release's Deployment, scaled by vLLM's own queue.

CPU load, KServe's default, says nothing about an LLM. In mode ``knative``, Knative itself scales, by concurrency.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Final

from stages.parts.base.errors import ConfigError
from stages.parts.cluster.api import Absent
from stages.parts.cluster.kinds import Kind, Object
from stages.rollout.kserve.applied import AppliedObjects
from stages.rollout.kserve.objects import AUTOSCALER, ENDPOINT, RELEASE, KServeEndpoint, manifest
from stages.rollout.kserve.release_pods import Pods, selector
from stages.rollout.target import Replicas

SCALED_OBJECTS: Final = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")
LOAD: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
SPENT: Final = "vllm:e2e_request_latency_seconds_sum"
POLL_S: Final = 15
FAILURES: Final = 3
"""After that many polls without an answer from Prometheus, the number of replicas stays as it is."""

BAD: Final = {"Ready": "False", "HPAActive": "False", "Fallback": "True", "Paused": "True"}
"""The conditions of a ScaledObject that does not scale; at first they are Unknown."""


def scaled_object(endpoint: KServeEndpoint, release: str, deployment: str, *, least: int | None = None) -> Object:
    """Build the autoscaler of one release: a canary scales by its own load, and promoting it changes nothing about its
    pods. There are *least* replicas or, if that is None, ``scaling.minimum``."""
    scaling = endpoint.settings.scaling
    # At most twice the replicas, and at most one replica less, in a minute.
    double = {"type": "Percent", "value": 100, "periodSeconds": 60}
    one_less = {"type": "Pods", "value": 1, "periodSeconds": 60}
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": scaling.scale_up_window_s, "policies": [double]},
        "scaleDown": {"stabilizationWindowSeconds": scaling.scale_down_delay_s, "policies": [one_less]},
    }
    query = {
        "serverAddress": endpoint.settings.prometheus,
        "query": load_query(endpoint, release),
        "threshold": str(scaling.concurrency),
        "ignoreNullValues": "false",  # a missing value does not mean an idle release
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment},
        "minReplicaCount": scaling.minimum if least is None else least,
        "maxReplicaCount": scaling.maximum,
        "pollingInterval": POLL_S,
        "fallback": {
            "failureThreshold": FAILURES,
            "replicas": scaling.minimum,
            "behavior": "currentReplicasIfHigher",
        },
        # KServe removes an autoscaler that is called like its Deployment, and KEDA refuses more than 63 characters,
        # also in the name that it would choose itself: keda-hpa-<deployment>.
        "advanced": {"horizontalPodAutoscalerConfig": {"name": f"keda-{deployment}", "behavior": behavior}},
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": query}],
    }
    labels = {ENDPOINT: endpoint.name, RELEASE: release}
    return manifest(SCALED_OBJECTS, endpoint, spec, name=deployment, labels=labels)


def load_query(endpoint: KServeEndpoint, release: str) -> str:
    """Write the query for the requests that all pods of one release have now, or had on average lately if that is more.

    A server tells its number when it has time to: if its requests are short and come together, that is between them,
    and the number is 0. Their times per second are the average of those that have ended.
    """
    of = f"{{{selector(endpoint, release)}}}"
    now = " + ".join(f"sum({metric}{of})" for metric in LOAD)
    lately = f"sum(rate({SPENT}{of}[1m]))"
    return f"({now} > {lately}) or {lately} or ({now})"


def lacking(scaled: Object) -> str:
    """Why KEDA or its HorizontalPodAutoscaler can't do its work; empty if neither says so."""
    conditions = scaled.get("status", {}).get("conditions", [])
    if not conditions:
        return "KEDA has not said anything about it"
    for condition in conditions:
        if BAD.get(condition["type"]) == condition["status"]:
            return f"KEDA says {condition['type']} {condition['status']}: {condition.get('message', '')}".rstrip(": ")
    return ""


def scaled_objects(endpoint: KServeEndpoint, deployments: Mapping[str, str]) -> list[Object]:
    """Build the autoscalers of these Deployments by release; none without Prometheus."""
    scaled = deployments if endpoint.settings.prometheus else {}
    return [scaled_object(endpoint, release, name) for release, name in scaled.items()]


class Autoscalers:
    """The autoscalers of one endpoint's releases. An autoscaler is called like the Deployment that it scales."""

    def __init__(self, objects: AppliedObjects, pods: Pods) -> None:
        self._objects, self._pods, self._endpoint, self._cluster = objects, pods, objects.endpoint, objects.cluster
        self._on = bool(objects.endpoint.settings.prometheus)

    def apply(self, release: str, deployment: str, service: Object) -> None:
        """Apply the autoscaler of a release, unless *service*, which serves it, names a number of replicas itself:
        KServe would set them back."""
        external = service["metadata"].get("annotations", {}).get(AUTOSCALER) == "external"
        unnumbered = "template" in service["spec"] and "replicas" not in service["spec"]
        if self._on and (external or unnumbered):
            self._cluster.kind(SCALED_OBJECTS.api_version, SCALED_OBJECTS.name)  # raises with what to install
            self._cluster.apply(SCALED_OBJECTS, scaled_object(self._endpoint, release, deployment), force=True)

    def remove(self, deployment: str) -> None:
        if self._on:
            self._objects.remove(SCALED_OBJECTS, deployment)

    def keep(self, *deployments: str) -> None:
        """Remove the autoscalers of all other Deployments, including those of Deployments that are gone already."""
        if not self._on:
            return
        with contextlib.suppress(Absent):  # KEDA is not installed
            scaled, _ = self._cluster.list(SCALED_OBJECTS, labels=f"{ENDPOINT}={self._endpoint.name}")
            for name in {body["metadata"]["name"] for body in scaled}.difference(deployments):
                self.remove(name)

    def prepare(self, release: str, deployment: str, stable: str | None, percent: int) -> str:
        """See ``Target.prepare``. A canary has as few replicas as its share needed so far, and more of them take
        minutes to load. Without an autoscaler every release has the same."""
        if stable is None or self._cluster.find(SCALED_OBJECTS, deployment) is None:
            return ""
        ready = len(self._pods.ready_names(release))
        serving = len(self._pods.ready_names(stable)) + ready  # the stable release may have followed its smaller share
        scaling = self._endpoint.settings.scaling
        needed = min(scaling.maximum, max(scaling.minimum, math.ceil(serving * percent / 100)))
        body = scaled_object(self._endpoint, release, deployment, least=needed)
        self._cluster.apply(SCALED_OBJECTS, body, force=True)
        return "" if ready >= needed else f"{ready} of {needed} are ready"

    def replicas(self, release: str, deployment: str) -> Replicas:
        if not self._on:
            raise ConfigError(
                f"nothing scales {release}: kserve.prometheus is not set",
                hint="KEDA, a Prometheus with manifests/monitoring, and kserve.prometheus; then slipway rollout start",
            )
        scaled = self._cluster.find(SCALED_OBJECTS, deployment)
        if scaled is None:
            self._cluster.kind(SCALED_OBJECTS.api_version, SCALED_OBJECTS.name)  # raises with what to install
            raise ConfigError(
                f"nothing scales {release}: there is no ScaledObject {deployment}",
                hint=f"slipway rollout start {self._endpoint.store.model}, with kserve.prometheus as it is now",
            )
        spec = scaled["spec"]
        threshold = int(spec["triggers"][0]["metadata"]["threshold"])
        running = self._pods.running(release)
        return Replicas(*running, spec["minReplicaCount"], spec["maxReplicaCount"], threshold, lacking(scaled))
