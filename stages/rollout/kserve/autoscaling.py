"""KEDA's part in Standard mode: replicas of one release's Deployment, scaled by vLLM's own queue.

CPU load, KServe's default, says nothing about an LLM. In Knative mode, Knative scales by concurrency: see ``objects``.
"""

from __future__ import annotations

from typing import Final

from stages.parts.cluster.kinds import Kind
from stages.rollout.kserve.objects import ENDPOINT, PART_OF, RELEASE, KServeEndpoint, Object
from stages.rollout.kserve.settings import Scaling

SCALED_OBJECTS: Final = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")
LOAD: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
SPENT: Final = "vllm:e2e_request_latency_seconds_sum"
POLL_S: Final = 15
FAILURES: Final = 3
"""After so many polls without an answer from Prometheus, the number of replicas stays as it is."""

BAD: Final = {"Ready": "False", "HPAActive": "False", "Fallback": "True", "Paused": "True"}
"""The conditions of a ScaledObject that does not scale; at first they are Unknown."""


def scaled_object(endpoint: KServeEndpoint, release: str, deployment: str, *, least: int | None = None) -> Object:
    """One for each release: a canary scales by its own load, and promoting it changes nothing about its pods.

    Needs ``settings.prometheus``.

    Args:
        least: the fewest replicas; None: ``scaling.minimum``.
    """
    scaling = endpoint.settings.scaling
    return {
        "apiVersion": SCALED_OBJECTS.api_version,
        "kind": SCALED_OBJECTS.name,
        "metadata": {
            "name": deployment,
            "namespace": endpoint.namespace,
            "labels": PART_OF | {ENDPOINT: endpoint.name, RELEASE: release},
        },
        "spec": {
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
            "advanced": {
                "horizontalPodAutoscalerConfig": {"name": f"keda-{deployment}", "behavior": _behavior(scaling)}
            },
            "triggers": [_trigger(endpoint, release)],
        },
    }


def selector(endpoint: KServeEndpoint, release: str) -> str:
    """Selects the series of one release; the last two labels come from the PodMonitor in ``manifests/monitoring``."""
    labels = {"namespace": endpoint.namespace, "slipway_endpoint": endpoint.name, "slipway_release": release}
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def load_query(endpoint: KServeEndpoint, release: str) -> str:
    """The number of requests that all pods of one release have now, or had on average lately if that is more.

    A server tells its number when it has time to: if its requests are short and come together, that is between them,
    and the number is 0. Their times per second are the average of those that have ended.
    """
    of = f"{{{selector(endpoint, release)}}}"
    now = " + ".join(f"sum({metric}{of})" for metric in LOAD)
    lately = f"sum(rate({SPENT}{of}[1m]))"
    return f"({now} > {lately}) or {lately} or ({now})"


def _behavior(scaling: Scaling) -> Object:
    """At most twice the replicas, and at most one replica less, in a minute."""
    double = {"type": "Percent", "value": 100, "periodSeconds": 60}
    one_less = {"type": "Pods", "value": 1, "periodSeconds": 60}
    return {
        "scaleUp": {"stabilizationWindowSeconds": scaling.scale_up_window_s, "policies": [double]},
        "scaleDown": {"stabilizationWindowSeconds": scaling.scale_down_delay_s, "policies": [one_less]},
    }


def _trigger(endpoint: KServeEndpoint, release: str) -> Object:
    return {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": endpoint.settings.prometheus,
            "query": load_query(endpoint, release),
            "threshold": str(endpoint.settings.scaling.concurrency),
            "ignoreNullValues": "false",  # a missing value does not mean an idle release
        },
    }


def bounds(scaled: Object) -> tuple[int, int, int]:
    """The minimum, the maximum and the requests for each replica that are in force."""
    spec = scaled["spec"]
    return spec["minReplicaCount"], spec["maxReplicaCount"], int(spec["triggers"][0]["metadata"]["threshold"])


def lacking(scaled: Object) -> str:
    """Why KEDA or its HorizontalPodAutoscaler can't do its work; empty: nothing is said."""
    conditions = scaled.get("status", {}).get("conditions", [])
    if not conditions:
        return "KEDA has not said anything about it"
    for condition in conditions:
        if BAD.get(condition["type"]) == condition["status"]:
            return f"KEDA says {condition['type']} {condition['status']}: {condition.get('message', '')}".rstrip(": ")
    return ""
